"""Batching of graphs: tried, never assumed.

A graph may be batched when each row is computed as if it were alone. A first dimension that varies is no proof: it may
be the time of a sequence, or a softmax may run over it. Where the batch is fixed, it is made to vary first.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import onnx_ir
from onnx_ir.passes.common import ShapeInferencePass
from onnxscript import optimizer

from graphkiln_backend.engines.onnxruntime import OnnxRuntimeEngine
from graphkiln_backend.graph.dtypes import AnyArray
from graphkiln_backend.graph.errors import ConversionError, GraphkilnError
from graphkiln_backend.graph.signature import Signature
from graphkiln_backend.passes.base import run_passes
from graphkiln_backend.passes.batch import VaryBatch
from graphkiln_backend.passes.constants import FoldConstants
from graphkiln_backend.passes.edge import Arrays
from graphkiln_backend.passes.graph_file import load, save
from graphkiln_backend.passes.rounding import Rounding
from graphkiln_backend.proof.comparison import compare
from graphkiln_backend.proof.policy import Limits, export_limits
from graphkiln_backend.repository.onnx_file import read_signature
from graphkiln_converters.recipe import Recipe
from graphkiln_converters.runnable import raise_opset, save_runnable
from graphkiln_converters.sources.base import (
    InputSpec,
    SourceModel,
    run_alone,
    run_in_batches,
    run_in_saved_batches,
    synthetic_samples,
)
from graphkiln_converters.sources.pytorch import TorchModel

_SEED = 20260102
_ROWS = 5
# Beside one row at a time.
_SIZES = (3, 5)

# Not folded unless asked for; with the batch fixed, they depend on constants only.
_SHAPES_ALONE = frozenset({"ConstantOfShape", "Range"})

Run = Callable[[Arrays], dict[str, AnyArray]]


def without_batch(signature: Signature) -> str:
    """Reason why a signature has no batch, varying or fixed; empty where it has one."""
    if signature.batchable or saved_size(signature):
        return ""
    listed = ", ".join(map(str, (*signature.inputs, *signature.outputs)))
    return f"its inputs and outputs have no common batch in their first dimension: {listed}"


def saved_size(signature: Signature) -> int:
    """The fixed batch of a signature: the first dimension that all inputs share, and the outputs may have; or 0."""
    sizes = {spec.shape[0] if spec.shape else 0 for spec in signature.inputs}
    size = sizes.pop() if len(sizes) == 1 else 0
    if not isinstance(size, int):
        return 0
    fits = all(spec.shape and (spec.shape[0] == size or isinstance(spec.shape[0], str)) for spec in signature.outputs)
    return size if fits else 0


def dependent_rows(alone: Run, together: Run, inputs: tuple[InputSpec, ...], limits: Limits) -> str:
    """Reason why rows cannot be computed together (the number of rows changes a row's result); empty where they can.

    Args:
        alone: Computes rows one by one.
        together: Computes any number of rows at once.
        inputs: Inputs of both.
        limits: Limits of their difference.
    """
    try:
        feeds = _rows(inputs)
        alone({name: array[:1] for name, array in feeds.items()})
    except GraphkilnError:
        return ""  # nothing to try it with, and the proof will say why
    try:
        expected = run_in_batches(alone, feeds, 1)
    except GraphkilnError as error:
        return f"one row at a time: {error.message}"
    for size in _SIZES:
        try:
            found = run_in_batches(together, feeds, size)
        except GraphkilnError as error:
            return f"it does not run with {size} rows at once: {error.message}"
        wrong = [str(error) for error in compare(expected, found) if not error.within(limits)]
        if wrong:
            return f"what it computes of a row depends on the other rows, {size} at once: {'; '.join(wrong)}"
    return ""


def _rows(inputs: tuple[InputSpec, ...]) -> Arrays:
    """Rows that differ in size, too, so that a maximum or a mean over them shows."""
    feeds = synthetic_samples(inputs, _ROWS, {}, seed=_SEED)
    return {name: _scaled(array) for name, array in feeds.items()}


def _scaled(array: AnyArray) -> AnyArray:
    if array.dtype.kind in "biuO":
        return array
    factors = np.linspace(0.5, 2.0, len(array)).reshape(-1, *[1] * (array.ndim - 1))
    scaled: AnyArray = (array.astype(np.float64) * factors).astype(array.dtype)
    return scaled


def _infer_shapes(model: onnx_ir.Model) -> None:
    """Shapes from the inputs alone: exporters invent names for dimensions that follow from them.

    Those in numbers stay: ONNX's inference ends at the first operator that an operator set has not in bf16.
    """
    declared = [value.shape for value in model.graph.outputs]
    for node in model.graph:
        for value in node.outputs:
            if value.shape is not None and value.shape.is_dynamic():
                value.shape = None
    optimizer.fold_constants(
        model,
        onnx_shape_inference=True,
        should_fold=lambda node: True if node.op_type in _SHAPES_ALONE else None,
    )
    ShapeInferencePass()(model)
    for value, shape in zip(model.graph.outputs, declared, strict=True):
        value.shape = value.shape or shape


def free_batch(model: onnx_ir.Model) -> onnx_ir.Model:
    """Let the fixed batch of a graph vary, in place; whether it computes the same is not proven yet.

    Raises:
        ConversionError: A node mixes the samples of the batch, or it is not known what it does with them.
    """
    raise_opset(model)
    _infer_shapes(model)
    run_passes(model, (FoldConstants(),))
    ShapeInferencePass()(model)
    note = run_passes(model, (VaryBatch(),)).reports[0].note
    if note:
        raise ConversionError(note)
    return model


def free_and_prove(graph: onnx_ir.Model, alone: Run, inputs: tuple[InputSpec, ...], copy: Path) -> onnx_ir.Model:
    """The graph with its batch made to vary, after it computed rows together as they are computed alone.

    Args:
        graph: With a fixed batch; changed in place.
        alone: Computes rows one by one, with the batch that was saved.
        inputs: Inputs, without the batch.
        copy: A file to write the graph to.

    Raises:
        ConversionError: The batch cannot vary, or rows depend on each other.
        LoweringError: ONNX Runtime does not run the graph.
    """
    graph = free_batch(graph)
    limits = rounding_limits(graph)
    save_runnable(graph, copy)
    with OnnxRuntimeEngine().build_reference(copy) as session:
        reason = dependent_rows(alone, session.run, inputs, limits)
    if reason:
        raise ConversionError(reason)
    return load(copy)


def rounding_limits(model: onnx_ir.Model) -> Limits:
    """Limits for two computations of a graph, in the type that it rounds to."""
    rounding = Rounding.of(model)
    return export_limits(rounding.precision, rounding.depth)


# PyTorch programs that take one batch size only: exported with it, then it is made to vary.
#
# The reference stays the program, run with the batch that it was saved for.


@dataclass(frozen=True, kw_only=True)
class FixedBatchModel(SourceModel):
    """A program with a fixed batch.

    Attributes:
        program: Program to run; its inputs are whole tensors, with the batch.
        graph: Its export, with a batch that varies unless it is served whole.
    """

    takes_fixed_batch = True

    program: TorchModel
    graph: onnx_ir.Model

    def run(self, feeds: Mapping[str, AnyArray]) -> dict[str, AnyArray]:
        """See `SourceModel.run`; other batches are split, and filled with the last row."""
        if self.whole:
            return self.program.run(feeds)
        return run_in_saved_batches(self.program.run, feeds, self.batch_size)

    def export(self) -> onnx_ir.Model:
        """See `SourceModel.export`.

        Raises:
            ConversionError: A dimension is requested to vary that was saved with one size.
        """
        shapes = {value.name: value.shape for value in self.graph.graph.inputs}
        for spec in self.inputs:
            for axis in (axis if self.whole else axis + 1 for axis in spec.dynamic):
                shape = shapes.get(spec.name)
                if shape is not None and isinstance(shape[axis], int):
                    raise ConversionError(
                        f"--dynamic: {self.description} takes only {shape[axis]} in dimension {axis} of '{spec.name}'",
                        hint="of the sizes that were saved with it, only the batch can be made to vary",
                    )
        return self.graph


def with_free_batch(
    program: TorchModel, export: Callable[[], onnx_ir.Model], recipe: Recipe, hint: str
) -> FixedBatchModel:
    """The program as a source whose batch varies, or that is served whole, with the reason.

    Args:
        program: Program to run; its inputs are whole.
        export: Makes its graph, with the sizes that it takes.
        recipe: Says whether the batch is to vary.
        hint: Way to save a program whose batch varies.

    Raises:
        ConversionError: It cannot be exported.
    """
    graph = export()
    whole = FixedBatchModel(
        program=program,
        graph=graph,
        description=program.description,
        libraries=program.libraries,
        inputs=program.inputs,
        whole="--batch fixed",
    )
    with TemporaryDirectory(prefix="graphkiln-") as folder:
        copy = Path(folder) / "model.onnx"
        save(graph, copy)
        signature = read_signature(copy)
        reason = without_batch(signature)
        if reason or recipe.batch != "free":
            return replace(whole, whole=reason or whole.whole)
        inputs = tuple(_without_batch(spec) for spec in program.inputs)
        freed = replace(whole, inputs=inputs, batch_size=saved_size(signature), whole="")
        alone = partial(run_alone, program.run, size=freed.batch_size)
        try:
            return replace(freed, graph=free_and_prove(export(), alone, inputs, copy))
        except GraphkilnError as error:
            return replace(whole, whole=f"{error.message} ({hint})")


def _without_batch(spec: InputSpec) -> InputSpec:
    dynamic = {axis - 1: ends for axis, ends in spec.dynamic.items() if axis}
    return replace(spec, shape=spec.shape[1:], dynamic=dynamic)
