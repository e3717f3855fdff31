"""Runs a session at the batch sizes that serving will form, before the first request does.

Runtimes plan memory and pick kernels per shape at the first run; a session that has run its shapes serves its first
request as fast as its thousandth.
"""

from __future__ import annotations

import numpy as np

from graphkiln_backend.engines.base import Session
from graphkiln_backend.graph.dtypes import AnyArray, DType
from graphkiln_backend.graph.errors import GraphkilnError
from graphkiln_backend.graph.golden import GoldenSamples
from graphkiln_backend.graph.signature import Signature

_RUNS = 2
"""The first run allocates, the second finds its memory planned."""


def warm_up(session: Session, sizes: tuple[int, ...], golden: GoldenSamples | None, *, already: bool = False) -> str:
    """Runs the session at every size.

    Args:
        session: Ready to run; its signature's first dimension varies when there is more than one size.
        sizes: Batch sizes.
        golden: Samples to repeat; synthetic ones are used when there are none.
        already: Whether the session has run the largest size once.

    Returns:
        Empty, or why warming stopped: synthetic inputs need not make sense to a graph, which is no fault of it.

    Raises:
        GraphkilnError: The golden samples fail.
    """
    for size in sizes:
        feeds = golden.batch(size) if golden else synthetic_feeds(session.signature, size)
        try:
            for _ in range(_RUNS - (already and size == max(sizes))):
                session.run(feeds)
        except GraphkilnError as error:
            if golden:
                raise
            return f"synthetic inputs at batch {size} fail: {error}"
    return ""


def synthetic_feeds(signature: Signature, batch: int = 1) -> dict[str, AnyArray]:
    """Zeros (empty strings) for every input.

    Args:
        signature: Of the graph.
        batch: Size of the first dimension where it varies; other dimensions that vary are 1.
    """
    feeds: dict[str, AnyArray] = {}
    for spec in signature.inputs:
        sizes = [dim if isinstance(dim, int) else batch if axis == 0 else 1 for axis, dim in enumerate(spec.shape)]
        if spec.dtype is DType.BYTES:
            feeds[spec.name] = np.full(sizes, "", np.object_)
        else:
            feeds[spec.name] = np.zeros(sizes, spec.dtype.numpy)
    return feeds
