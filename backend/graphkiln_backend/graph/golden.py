"""Golden samples: inputs and the outputs that a saved graph must compute, stored beside it as an .npz file."""

from __future__ import annotations

import io
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from graphkiln_backend.graph.arrays import is_text, pack_text, read_npz, unpack_text
from graphkiln_backend.graph.dtypes import AnyArray
from graphkiln_backend.graph.errors import ManifestError
from graphkiln_backend.graph.modules import LazyModule

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
else:
    np = LazyModule("numpy")

_PREFIXES = ("input", "source", "graph")
# Suffixes of the two arrays that store an array of text.
_BYTES, _LENGTHS = ".text", ".lengths"
# An empty array of this name marks a graph without a batch dimension.
_WHOLE = "whole"


@dataclass(frozen=True, kw_only=True, slots=True)
class GoldenSamples:
    """Inputs and two sets of reference outputs by tensor name: `[samples, ...]` each, or one sample of whole tensors.

    Attributes:
        inputs: Inputs.
        source_outputs: Outputs of the source model in fp32.
        graph_outputs: Outputs of the saved graph at conversion (ONNX Runtime on the CPU, optimizations off).
        whole: Whether the arrays are one sample of a graph without a batch dimension.
    """

    inputs: Mapping[str, AnyArray]
    source_outputs: Mapping[str, AnyArray]
    graph_outputs: Mapping[str, AnyArray]
    whole: bool = False

    @property
    def count(self) -> int:
        """Number of samples."""
        return 1 if self.whole else len(next(iter(self.inputs.values())))

    @property
    def feeds(self) -> tuple[Mapping[str, AnyArray], ...]:
        """Inputs of each sample, for a session."""
        if self.whole:
            return (self.inputs,)
        return tuple({name: array[i : i + 1] for name, array in self.inputs.items()} for i in range(self.count))

    def batch(self, size: int) -> Mapping[str, AnyArray]:
        """A batch of the inputs, repeated in order; for a graph without a batch dimension, the one sample."""
        return self.inputs if self.whole else repeated(self.inputs, size)

    def shuffled(self, size: int) -> GoldenSamples:
        """A batch in pseudo-random order, to detect sessions that mix up parts of a batch.

        With samples repeated in order, all parts could be equal. The source model's outputs are omitted.

        Args:
            size: Batch size.
        """
        order = random_order(self.count, size)
        inputs, graph = (
            {name: array[order] for name, array in group.items()} for group in (self.inputs, self.graph_outputs)
        )
        return replace(self, inputs=inputs, source_outputs={}, graph_outputs=graph)

    def first(self, count: int) -> GoldenSamples:
        """Select the first samples; a sample of whole tensors stays."""
        if self.whole:
            return self
        inputs, source, graph = (
            {name: array[:count] for name, array in group.items()}
            for group in (self.inputs, self.source_outputs, self.graph_outputs)
        )
        return replace(self, inputs=inputs, source_outputs=source, graph_outputs=graph)

    def only(self, outputs: Collection[str]) -> GoldenSamples:
        """Select outputs."""
        source, graph = (
            {name: array for name, array in group.items() if name in outputs}
            for group in (self.source_outputs, self.graph_outputs)
        )
        return replace(self, source_outputs=source, graph_outputs=graph)

    def write(self, path: Path) -> None:
        """Write a compressed .npz of plain arrays (no pickles)."""
        groups = zip(_PREFIXES, (self.inputs, self.source_outputs, self.graph_outputs), strict=True)
        arrays: dict[str, AnyArray] = {}
        for prefix, group in groups:
            for name, array in group.items():
                arrays |= _plain(prefix, name, array)
        marks = {_WHOLE: np.empty(0, np.uint8)} if self.whole else {}
        content = io.BytesIO()  # on a full disk, an unfinished archive prints a traceback
        np.savez_compressed(content, **arrays, **marks)
        path.write_bytes(content.getbuffer())

    @classmethod
    def read(cls, path: Path) -> GoldenSamples:
        """Read a file written by `write`.

        Raises:
            ManifestError: The file is missing, damaged, or of another kind.
        """
        groups: dict[str, dict[str, AnyArray]] = {prefix: {} for prefix in _PREFIXES}
        try:
            arrays = read_npz(path)
            whole = arrays.pop(_WHOLE, None) is not None
            for key, array in arrays.items():
                prefix, _, name = key.partition("/")
                if prefix.endswith(_BYTES):
                    prefix = prefix.removesuffix(_BYTES)
                    groups[prefix][name] = unpack_text(array, arrays[f"{prefix}{_LENGTHS}/{name}"])
                elif not prefix.endswith(_LENGTHS):
                    groups[prefix][name] = array
        except ManifestError as error:
            raise ManifestError(f"cannot read golden samples from {path}: {error.message}") from error
        except KeyError as error:
            raise ManifestError(f"cannot read golden samples from {path}: {error}") from error
        source, graph = groups["source"], groups["graph"]
        return cls(inputs=groups["input"], source_outputs=source, graph_outputs=graph, whole=whole)


def _plain(prefix: str, name: str, array: AnyArray) -> dict[str, AnyArray]:
    if not is_text(array):
        return {f"{prefix}/{name}": array}
    content, lengths = pack_text(array)
    return {f"{prefix}{_BYTES}/{name}": content, f"{prefix}{_LENGTHS}/{name}": lengths}


def repeated(samples: Mapping[str, AnyArray], size: int) -> dict[str, AnyArray]:
    """Repeat samples in order up to `size`."""
    return {name: array[np.arange(size) % len(array)] for name, array in samples.items()}


def random_order(count: int, size: int) -> npt.NDArray[np.int64]:
    """Indices of samples, `[size]`, in a fixed pseudo-random order.

    For any size of parts, the first part of the batch differs from its neighbor and from the last, so that swapped
    parts are detected.

    Args:
        count: Number of samples; a single one cannot be permuted.
        size: Batch size.
    """
    generator = np.random.default_rng(0)
    order = generator.integers(count, size=size)
    while count > 1 and not _has_distinct_parts(order):
        order = generator.integers(count, size=size)
    return order


def _has_distinct_parts(order: npt.NDArray[np.int64]) -> bool:
    sizes = range(1, len(order) // 2 + 1)
    pairs = ((order[:rows], other) for rows in sizes for other in (order[rows : 2 * rows], order[-rows:]))
    return not any(np.array_equal(first, other) for first, other in pairs)


def joined(outputs: Sequence[Mapping[str, AnyArray]]) -> dict[str, AnyArray]:
    """Concatenate the outputs of samples to those of a batch; return a single sample unchanged."""
    if len(outputs) == 1:
        return dict(outputs[0])
    return {name: np.concatenate([each[name] for each in outputs]) for name in outputs[0]}
