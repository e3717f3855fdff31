"""PyTorch programs that take one batch size only: exported with it, then it is made to vary.

The reference stays the program, run with the batch that it was saved for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import onnx_ir

from graphkiln_backend.graph.dtypes import AnyArray
from graphkiln_backend.graph.errors import ConversionError, GraphkilnError
from graphkiln_backend.passes.graph_file import save
from graphkiln_backend.repository.onnx_file import read_signature
from graphkiln_converters.sources.base import EXPORT_BATCH, InputSpec, SourceOptions
from graphkiln_converters.sources.batches import free_and_prove, saved_size, without_batch
from graphkiln_converters.sources.pytorch import TorchModel


@dataclass(frozen=True, kw_only=True, slots=True)
class FixedBatchModel:
    """A program with a fixed batch as a `SourceModel`.

    Attributes:
        program: What runs; its inputs are whole tensors, with the batch.
        graph: Its export, with a batch that varies unless it is served whole.
        inputs: Its inputs: without the batch, or whole.
        batch_size: The batch that it takes; `EXPORT_BATCH` where it is served whole.
        whole: Why its requests cannot be batched, or empty where they can.
    """

    program: TorchModel
    graph: onnx_ir.Model
    inputs: tuple[InputSpec, ...]
    batch_size: int = EXPORT_BATCH
    whole: str = ""
    preprocess: None = None
    labels: tuple[str, ...] = ()

    @property
    def description(self) -> str:
        """See `SourceModel.description`."""
        return self.program.description

    @property
    def libraries(self) -> tuple[str, ...]:
        """See `SourceModel.libraries`."""
        return self.program.libraries

    @property
    def notes(self) -> tuple[str, ...]:
        """See `NotedSource`."""
        return (f"served whole, with max_batch_size 0: {self.whole}",) if self.whole else ()

    def run(self, feeds: Mapping[str, AnyArray]) -> dict[str, AnyArray]:
        """See `SourceModel.run`; other batches are split, and filled with the last row."""
        if self.whole:
            return self.program.run(feeds)
        rows = len(next(iter(feeds.values())))
        batches = [
            self.program.run({name: _filled(array, start, self.batch_size) for name, array in feeds.items()})
            for start in range(0, rows, self.batch_size)
        ]
        return {name: np.concatenate([batch[name] for batch in batches])[:rows] for name in batches[0]}

    def run_alone(self, feeds: Mapping[str, AnyArray]) -> dict[str, AnyArray]:
        """Computes rows one by one: each fills the batch."""
        size = self.batch_size
        rows = [
            self.program.run({name: np.repeat(array[i : i + 1], size, axis=0) for name, array in feeds.items()})
            for i in range(len(next(iter(feeds.values()))))
        ]
        return {name: np.concatenate([row[name][:1] for row in rows]) for name in rows[0]}

    def export(self, dynamic: Mapping[str, Mapping[int, tuple[int, int]]]) -> onnx_ir.Model:
        """See `SourceModel.export`.

        Raises:
            ConversionError: A dimension is requested to vary that was saved with one size.
        """
        shapes = {value.name: value.shape for value in self.graph.graph.inputs}
        for name, axes in dynamic.items():
            for axis in (axis if self.whole else axis + 1 for axis in axes):
                shape = shapes.get(name)
                if shape is not None and isinstance(shape[axis], int):
                    raise ConversionError(
                        f"--dynamic: {self.description} takes only {shape[axis]} in dimension {axis} of '{name}'",
                        hint="of the sizes that were saved with it, only the batch can be made to vary",
                    )
        return self.graph

    def close(self) -> None:
        """See `SourceModel.close`."""


def with_free_batch(
    program: TorchModel, export: Callable[[], onnx_ir.Model], options: SourceOptions, hint: str
) -> FixedBatchModel:
    """The program as a source whose batch varies, or that is served whole, with the reason.

    Args:
        program: What runs; its inputs are whole.
        export: Makes its graph, with the sizes that it takes.
        options: Whether the batch is to vary.
        hint: How a program is saved whose batch varies.

    Raises:
        ConversionError: It cannot be exported.
    """
    graph = export()
    whole = FixedBatchModel(program=program, graph=graph, inputs=program.inputs, whole="--batch fixed")
    with TemporaryDirectory(prefix="graphkiln-") as folder:
        copy = Path(folder) / "model.onnx"
        save(graph, copy)
        signature = read_signature(copy)
        reason = without_batch(signature)
        if reason or not options.free_batch:
            return replace(whole, whole=reason or whole.whole)
        inputs = tuple(_without_batch(spec) for spec in program.inputs)
        freed = replace(whole, inputs=inputs, batch_size=saved_size(signature), whole="")
        try:
            return replace(freed, graph=free_and_prove(export(), freed.run_alone, inputs, copy))
        except GraphkilnError as error:
            return replace(whole, whole=f"{error.message} ({hint})")


def _without_batch(spec: InputSpec) -> InputSpec:
    dynamic = {axis - 1: ends for axis, ends in spec.dynamic.items() if axis}
    return replace(spec, shape=spec.shape[1:], dynamic=dynamic)


def _filled(array: AnyArray, start: int, size: int) -> AnyArray:
    rows = array[start : start + size]
    return np.concatenate([rows, np.repeat(rows[-1:], size - len(rows), axis=0)])
