"""Warm-up: run a session at the batch sizes whose first run is slow.

The cost of the first run at a batch size depends on engine and graph (CPU time, 2 cores). ONNX Runtime prepares its
kernels in the very first run; another size costs 0.2 ms, and the allocation of a larger one a tenth to a third of a
run. OpenVINO generates code for each size: 15 to 50 ms, which is five runs of MobileNetV3-small and negligible beside a
run of ResNet-50. So sizes are tried in ascending order until the first run at a size costs hardly more than the second.
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

_LITTLE_S = 1e-3  # extra time of a first run that no user notices
_PAYS = 1.5  # ratio of first to second run from which warming up a size pays
_LONG_S = 0.2  # CPU time of a run beside which code generation does not matter


@dataclass(frozen=True, kw_only=True, slots=True)
class WarmUp:
    """Outcome of a warm-up.

    Attributes:
        sizes: Batch sizes that were worth warming up, in order.
        note: Error of a synthetic batch that stopped the warm-up, or empty.
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
    """Run a session at the batch sizes that pay.

    Args:
        session: The session; its first dimension is dynamic if there is more than one size.
        sizes: Batch sizes of requests, in ascending order.
        samples: Golden samples to repeat, or a recipe for synthetic requests.
        everything: Run every size twice, for devices whose work does not show in CPU time: the first run allocates,
            the second plans its memory.
        already: Whether the session already ran the largest size.

    Raises:
        GraphkilnError: The golden samples fail.
    """
    runs = _Runs(session, samples)
    try:
        if not everything:
            return WarmUp(sizes=_warm_what_pays(runs, sizes[-1], already=already))
        twice = tuple(size for size in sizes for _ in range(1 if already and size == sizes[-1] else 2))
        for size in twice:
            runs.run(size)
        return WarmUp(sizes=twice)
    except GraphkilnError as error:
        return runs.stopped_by(error)


def repeat_warm_up(session: Session, sizes: tuple[int, ...], samples: GoldenSamples | SyntheticInputs) -> WarmUp:
    """Run a session at the sizes that paid in an earlier warm-up.

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
    """Return a batch of golden samples or synthetic inputs."""
    return samples.batch(signature, size) if isinstance(samples, SyntheticInputs) else samples.batch(size)


class _Runs:
    """Timed runs of a session; `largest` is the largest batch size so far."""

    def __init__(self, session: Session, samples: GoldenSamples | SyntheticInputs) -> None:
        self._session = session
        self._samples = samples
        self._size = 0
        self.largest = 0

    def run(self, size: int) -> float:
        """Return the CPU time of a run over all threads, in seconds."""
        self._size = size
        feeds = feeds_of(self._samples, self._session.signature, size)
        begun = time.process_time()
        self._session.run(feeds)
        self.largest = max(self.largest, size)
        return time.process_time() - begun

    def stopped_by(self, error: GraphkilnError) -> WarmUp:
        """Note the failure of a synthetic batch; re-raise that of golden samples."""
        if isinstance(self._samples, GoldenSamples):
            raise error
        return WarmUp(note=f"a synthetic batch of {self._size} fails: {error}")


def _warm_what_pays(runs: _Runs, largest: int, *, already: bool) -> tuple[int, ...]:
    one = runs.run(1)
    if one > _LONG_S:
        return ()
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
    if one * largest < _LONG_S and largest > runs.largest and not already:  # cheap, and it allocates the most memory
        runs.run(largest)
        paid.append(largest)
    return tuple(paid)
