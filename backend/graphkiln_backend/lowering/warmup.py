"""Runs a session at the batch sizes that serving will form, before the first request does.

Runtimes plan memory and pick kernels per shape at the first run; a session that has run its shapes serves its first
request as fast as its thousandth.
"""

from __future__ import annotations

from collections.abc import Mapping

from graphkiln_backend.engines.base import Session
from graphkiln_backend.graph.dtypes import AnyArray
from graphkiln_backend.graph.errors import GraphkilnError
from graphkiln_backend.graph.golden import GoldenSamples
from graphkiln_backend.graph.signature import Signature
from graphkiln_backend.lowering.made_up import MadeUp

_RUNS = 2
"""The first run allocates, the second finds its memory planned."""


def warm_up(session: Session, sizes: tuple[int, ...], samples: GoldenSamples | MadeUp, *, already: bool = False) -> str:
    """Runs the session at every size.

    Args:
        session: Ready to run; its signature's first dimension varies when there is more than one size.
        sizes: Batch sizes.
        samples: Golden samples to repeat, or how to make some up.
        already: Whether the session has run the largest size once.

    Returns:
        Empty, or why warming stopped: what was made up need not make sense to a graph, which is no fault of it.

    Raises:
        GraphkilnError: The golden samples fail.
    """
    for size in sizes:
        feeds = feeds_of(samples, session.signature, size)
        try:
            for _ in range(_RUNS - (already and size == max(sizes))):
                session.run(feeds)
        except GraphkilnError as error:
            if isinstance(samples, GoldenSamples):
                raise
            return f"a made-up batch of {size} fails: {error}"
    return ""


def feeds_of(samples: GoldenSamples | MadeUp, signature: Signature, size: int) -> Mapping[str, AnyArray]:
    """A batch of golden samples, or of a request that is made up."""
    return samples.feeds(signature, size) if isinstance(samples, MadeUp) else samples.batch(size)
