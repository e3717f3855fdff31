"""`oneflow:DIR`: graphs written by OneFlow's `flow.save(graph, DIR)`, read without OneFlow.

The reference is the graph translated operation by operation, run with its saved batch size and without optimization.
`--reference` compares with outputs of OneFlow itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import onnx_ir

from graphkiln_backend.engines.base import Session
from graphkiln_backend.engines.onnxruntime import OnnxRuntimeEngine
from graphkiln_backend.graph.dtypes import AnyArray, DType
from graphkiln_backend.graph.errors import ConversionError, LoweringError
from graphkiln_backend.graph.files import read_text
from graphkiln_backend.passes.base import run_passes
from graphkiln_backend.passes.batch import VaryBatch, saved_batch
from graphkiln_backend.passes.fusions import AddIntoProducer
from graphkiln_backend.passes.graph_file import load, save
from graphkiln_converters.oneflow.mlir import parse
from graphkiln_converters.oneflow.translation import translate
from graphkiln_converters.recipe import Recipe
from graphkiln_converters.sources.base import InputSpec, SourceModel, run_in_saved_batches

GRAPH_TEXT = "model.mlir"


@dataclass(frozen=True, kw_only=True)
class OneflowGraph(SourceModel):
    """A saved graph; its inputs are `INPUT_<i>`.

    Attributes:
        session: Reference session with the saved batch size.
    """

    session: Session
    _temporary: TemporaryDirectory[str]

    def run(self, feeds: Mapping[str, AnyArray]) -> dict[str, AnyArray]:
        """See `SourceModel.run`; other batches are padded or split to the saved batch size."""
        return run_in_saved_batches(self.session.run, feeds, self.batch_size)

    def export(self) -> onnx_ir.Model:
        """See `SourceModel.export`.

        Raises:
            ConversionError: The batch cannot be made dynamic, or another dynamic dimension is requested.
        """
        if any(spec.dynamic for spec in self.inputs):
            raise ConversionError("--dynamic: only the batch of a OneFlow graph can vary; its other sizes are fixed")
        model = load(_file(self._temporary))
        run_passes(model, (VaryBatch(), AddIntoProducer()))  # OneFlow adds biases in separate nodes
        return model

    def close(self) -> None:
        """See `SourceModel.close`."""
        self.session.close()
        self._temporary.cleanup()


def open_source(location: str, recipe: Recipe) -> OneflowGraph:
    """Read a saved graph and its weights.

    Raises:
        ConversionError: The graph does not exist, a file is missing, damaged or does not fit the graph, or an operation
            is not supported.
    """
    if recipe.shapes:
        raise ConversionError(f"{location} contains its own sizes", hint="leave --shape out")
    folder = _folder(Path(location))
    try:
        text = read_text(folder / GRAPH_TEXT)
    except (OSError, UnicodeDecodeError) as error:
        raise ConversionError(f"{folder / GRAPH_TEXT} cannot be read: {error}") from error
    try:
        model = translate(parse(text), folder)
        batch_size = saved_batch(model)
    except ConversionError as error:
        raise ConversionError(f"{folder / GRAPH_TEXT}: {error.message}", hint=error.hint) from error
    if batch_size < 1:
        raise ConversionError(
            f"{folder / GRAPH_TEXT}: the graph was saved with an empty batch",
            hint="trace the model with one sample or more, then save the graph again",
        )
    inputs = tuple(
        InputSpec(
            name=str(value.name),
            dtype=DType.from_onnx(int(value.dtype or onnx_ir.DataType.UNDEFINED)),
            shape=tuple(map(int, (value.shape or onnx_ir.Shape(())).numpy()))[1:],
        )
        for value in model.graph.inputs
    )
    temporary = TemporaryDirectory(prefix="graphkiln-")
    try:
        save(model, _file(temporary))
        session = OnnxRuntimeEngine().build_reference(_file(temporary))
    except LoweringError as error:
        temporary.cleanup()
        raise ConversionError(f"{location} cannot be run: {error}") from error
    except BaseException:
        temporary.cleanup()
        raise
    return OneflowGraph(
        description=f"oneflow:{folder}",
        libraries=("lark",),
        inputs=inputs,
        batch_size=batch_size,
        session=session,
        _temporary=temporary,
    )


def _folder(path: Path) -> Path:
    """Return the folder, or its subfolder `model`, the name in OneFlow's documentation."""
    for folder in (path, path / "model"):
        if (folder / GRAPH_TEXT).is_file():
            return folder
    problem = "there is no folder" if not path.is_dir() else f"there is no {GRAPH_TEXT} in"
    raise ConversionError(f"{problem} {path}", hint='name the folder that flow.save(graph, "DIR") wrote: oneflow:DIR')


def _file(temporary: TemporaryDirectory[str]) -> Path:
    return Path(temporary.name) / "saved.onnx"
