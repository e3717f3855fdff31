"""Run a session at batch sizes before the first request does, as far as that pays.

The cost of the first run of a size beside a later one differs by engine and graph (processor time, 2 cores):
ONNX Runtime makes its kernels ready at the very first run; a further size costs it 0.2 ms, and the memory that a larger
one takes for the first time a tenth to a third of the run. OpenVINO makes code for each size: 15 to 50 ms, which is
five runs of MobileNetV3-small and nothing beside a run of ResNet-50. So the sizes are tried in
ascending order, until the first run of one costs hardly more than the second.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass

from graphkiln_backend.engines.base import Session
from graphkiln_backend.graph.dtypes import AnyArray
from graphkiln_backend.graph.errors import GraphkilnError
from graphkiln_backend.graph.golden import GoldenSamples
from graphkiln_backend.graph.signature import Signature
from graphkiln_backend.lowering.trial import SyntheticInputs

_LITTLE_S = 1e-3  # no request waits noticeably longer for what a first run costs more than this
_PAYS = 1.5  # A first run that takes this many times as long as the next pays for being made before a request is
_LONG_S = 0.2  # processor time of a run beside which code for its size does not matter


@dataclass(frozen=True, kw_only=True, slots=True)
class WarmUp:
    """Outcome of warming up.

    Attributes:
        sizes: Batch sizes that paid, in the order of the runs.
        note: Empty, or the reason why it stopped: a made-up request need not make sense to a graph.
    """

    sizes: tuple[int, ...] = ()
    note: str = ""


def warm_up(
    session: Session,
    sizes: tuple[int, ...],
    samples: GoldenSamples | SyntheticInputs,
    *,
    everything: bool = False,
    already: bool = False,
) -> WarmUp:
    """Run a session at the sizes that pay, found by trying.

    Args:
        session: Ready to run; its signature's first dimension varies when there is more than one size.
        sizes: Batch sizes that serving will form, the largest last.
        samples: Golden samples to repeat, or how to make some up.
        everything: Whether to run every one of these sizes twice instead: where a run computes on another device, its
            processor time says nothing.
        already: Whether the session has run the largest size once.

    Raises:
        GraphkilnError: The golden samples fail.
    """
    runs = _Runs(session, samples)
    try:
        if everything:
            return WarmUp(sizes=_warm_all(runs, sizes, already=already))
        return WarmUp(sizes=_warm_what_pays(runs, sizes[-1], already=already))
    except GraphkilnError as error:
        return runs.stopped_by(error)


def repeat_warm_up(session: Session, sizes: tuple[int, ...], samples: GoldenSamples | SyntheticInputs) -> WarmUp:
    """Run a session at the sizes that have paid before.

    Args:
        session: As for `warm_up`.
        sizes: Its outcome.
        samples: As for `warm_up`.

    Raises:
        GraphkilnError: The golden samples fail.
    """
    runs = _Runs(session, samples)
    try:
        for size in sizes:
            runs.run(size)
    except GraphkilnError as error:
        return runs.stopped_by(error)
    return WarmUp(sizes=sizes)


def feeds_of(samples: GoldenSamples | SyntheticInputs, signature: Signature, size: int) -> Mapping[str, AnyArray]:
    """Return a batch of golden samples, or of a request that is made up."""
    return samples.batch(signature, size) if isinstance(samples, SyntheticInputs) else samples.batch(size)


class _Runs:
    """Runs of a session at batch sizes; `largest` is the largest so far."""

    def __init__(self, session: Session, samples: GoldenSamples | SyntheticInputs) -> None:
        self._session = session
        self._samples = samples
        self._size = 0
        self.largest = 0

    def run(self, size: int) -> float:
        """Processor time of a run in seconds: of all threads, whatever else happens on the machine."""
        self._size = size
        feeds = feeds_of(self._samples, self._session.signature, size)
        begun = time.process_time()
        self._session.run(feeds)
        self.largest = max(self.largest, size)
        return time.process_time() - begun

    def stopped_by(self, error: GraphkilnError) -> WarmUp:
        """Note that a made-up batch failed; golden samples must not fail."""
        if isinstance(self._samples, GoldenSamples):
            raise error
        return WarmUp(note=f"a made-up batch of {self._size} fails: {error}")


def _warm_all(runs: _Runs, sizes: tuple[int, ...], *, already: bool) -> tuple[int, ...]:
    """Run every size twice: the first run allocates, the second finds its memory planned."""
    wanted = tuple(size for size in sizes for _ in range(1 if already and size == sizes[-1] else 2))
    for size in wanted:
        runs.run(size)
    return wanted


def _warm_what_pays(runs: _Runs, largest: int, *, already: bool) -> tuple[int, ...]:
    one = runs.run(1)
    if one > _LONG_S:
        return ()
    paid = _climb(runs, largest)
    if one * largest < _LONG_S and largest > runs.largest and not already:  # cheap, and it takes the most memory
        runs.run(largest)
        paid += (largest,)
    return paid


def _climb(runs: _Runs, largest: int) -> tuple[int, ...]:
    """Doubles the size until that no longer pays; the sizes that did, and those between them."""
    paid: list[int] = []
    size = 1
    while size < largest:
        below, size = size, min(2 * size, largest)
        first, later = runs.run(size), runs.run(size)
        if first < later * _PAYS or first - later < _LITTLE_S or later > _LONG_S:
            break
        between = range(below + 1, size)
        for other in between:
            runs.run(other)
        paid += (*between, size)
    return tuple(paid)
