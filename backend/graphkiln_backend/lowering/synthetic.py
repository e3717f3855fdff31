"""Inputs for graphs without golden samples: made from the signature, since sensible values are unknown."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from graphkiln_backend.graph.dtypes import AnyArray, DType
from graphkiln_backend.graph.signature import Signature, TensorSpec

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
