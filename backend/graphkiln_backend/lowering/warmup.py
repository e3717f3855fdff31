"""Run a session at batch sizes before the first request does, as far as that pays.

The cost of the first run of a size beside a later one differs by engine and graph (processor time, 2 cores):
ONNX Runtime makes its kernels ready at the very first run; a further size costs it 0.2 ms, and the memory that a larger
one takes for the first time a tenth to a third of the run. OpenVINO makes code for each size: 15 to 50 ms, which is
five runs of MobileNetV3-small and nothing beside a run of ResNet-50. So the sizes are tried in
ascending order, until the first run of one costs hardly more than the second.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from graphkiln_backend.engines.base import Session
from graphkiln_backend.graph.dtypes import AnyArray, DType
from graphkiln_backend.graph.errors import GraphkilnError
from graphkiln_backend.graph.golden import GoldenSamples
from graphkiln_backend.graph.signature import Signature, TensorSpec

# Inputs for graphs without golden samples: made from the signature, since sensible values are unknown.

# Of dimensions that vary: the first that a graph takes. Most networks take no image of one pixel.
_SIZES = (1, 8, 64, 224)
# Of a request in which a size is tried that may be too large: four dimensions of 224 would take 10 GB.
_MOST_ELEMENTS = 1 << 22
_SCALES = (1.0, 0.5, 4.0, 0.25)  # of the floating-point numbers of rows that are computed together
_FILLS = 4
_ASCENDING = 2
_COUNTED = 3
_TEXTS = ("", "a", "a", "2")


@dataclass(frozen=True, slots=True)
class SyntheticInputs:
    """A recipe for requests.

    Attributes:
        size: Size of every dimension that varies, but for the batch.
        fill: 0: floating-point numbers between 0 and 1, other numbers 0, empty texts; 1: normal numbers, 1, a letter;
            2: normal numbers, ascending ones, a letter; 3: 2 to 5 in turn, which sizes, scales and repeats may be.
    """

    size: int = 1
    fill: int = 0

    def feeds(self, signature: Signature, batch: int = 1, *, seed: int = 0) -> dict[str, AnyArray]:
        """Make one request; `batch` is the size of a first dimension that varies."""
        generator = np.random.default_rng(seed)
        return {spec.name: self._array(spec, batch, generator) for spec in signature.inputs}

    def batch(self, signature: Signature, size: int) -> dict[str, AnyArray]:
        """Make one request of one row, repeated: as large as `feeds` makes it, at the cost of a copy."""
        row = self.feeds(signature)
        return {spec.name: _repeated(row[spec.name], spec, size) for spec in signature.inputs}

    def _array(self, spec: TensorSpec, batch: int, generator: np.random.Generator) -> AnyArray:
        dims = enumerate(spec.shape)
        shape = [dim if isinstance(dim, int) else batch if axis == 0 else self.size for axis, dim in dims]
        if spec.dtype is DType.BYTES:
            return np.full(shape, _TEXTS[self.fill], np.object_)
        if self.fill == _COUNTED:
            return (np.arange(np.prod(shape, dtype=np.int64)) % 4 + 2).reshape(shape).astype(spec.dtype.numpy)
        if spec.dtype.is_float:
            numbers = generator.standard_normal(shape) if self.fill else generator.random(shape)
            return numbers.astype(spec.dtype.numpy)
        if self.fill == _ASCENDING:
            return np.arange(np.prod(shape, dtype=np.int64)).reshape(shape).astype(spec.dtype.numpy)
        return np.full(shape, self.fill, spec.dtype.numpy)


def synthetic_inputs(signature: Signature) -> Iterator[SyntheticInputs]:
    """Yield synthetic inputs for a graph, the plainest first."""
    varies = any(isinstance(dim, str) for spec in signature.inputs for dim in spec.shape[1:])
    for size in _SIZES if varies else _SIZES[:1]:
        if size == _SIZES[0] or _elements(signature, size) <= _MOST_ELEMENTS:
            yield from (SyntheticInputs(size=size, fill=fill) for fill in range(_FILLS))


def different_rows(signature: Signature, size: int) -> Iterator[dict[str, AnyArray]]:
    """Yield requests of one row each that differ as much as they can, so that a mean over them shows.

    Args:
        signature: Signature of a graph whose inputs all have a first dimension that varies.
        size: Size of every other dimension that varies.
    """
    for row, scale in enumerate(_SCALES):
        feeds = SyntheticInputs(size=size, fill=row % _FILLS).feeds(signature, seed=row)
        yield {name: _scaled(array, scale) for name, array in feeds.items()}


def _scaled(array: AnyArray, scale: float) -> AnyArray:
    if array.dtype.kind in "biuOSU":
        return array
    scaled: AnyArray = (array.astype(np.float64) * scale).astype(array.dtype)
    return scaled


def _repeated(array: AnyArray, spec: TensorSpec, size: int) -> AnyArray:
    return np.repeat(array, size, axis=0) if spec.shape and isinstance(spec.shape[0], str) else array


def _elements(signature: Signature, size: int) -> int:
    shapes = ([dim if isinstance(dim, int) else size for dim in spec.shape[1:]] for spec in signature.inputs)
    return sum(map(math.prod, shapes))


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
    if one * largest < _LONG_S and largest > runs.largest:  # cheap, and it takes the most memory
        again = (largest,) if already else (largest, largest)
        for size in again:
            runs.run(size)
        paid += again
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
