"""Batching of graphs, verified by running them.

A graph can be batched if the result of a row does not depend on the other rows. A dynamic first dimension does not
imply that: it may be the time axis of a sequence, or a softmax may run over it. A fixed batch is made dynamic first.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx_ir
from onnx_ir.passes.common import ShapeInferencePass

from graphkiln_backend.engines.onnxruntime import OnnxRuntimeEngine
from graphkiln_backend.graph.dtypes import AnyArray
from graphkiln_backend.graph.errors import ConversionError, GraphkilnError
from graphkiln_backend.graph.signature import Signature
from graphkiln_backend.passes.base import run_passes
from graphkiln_backend.passes.batch import VaryBatch
from graphkiln_backend.passes.edge import Arrays
from graphkiln_backend.passes.folding import FoldConstants
from graphkiln_backend.passes.graph_file import load
from graphkiln_backend.passes.rounding import Rounding
from graphkiln_backend.proof.comparison import compare
from graphkiln_backend.proof.policy import Limits, export_limits
from graphkiln_converters.runnable import raise_opset, save_runnable
from graphkiln_converters.sources.base import (
    InputSpec,
    run_in_batches,
    synthetic_samples,
)

_SEED = 20260102
_ROWS = 5
# Beside one row at a time.
_SIZES = (3, 5)

Run = Callable[[Arrays], dict[str, AnyArray]]


def without_batch(signature: Signature) -> str:
    """Return the reason why a signature has no batch dimension, dynamic or fixed; empty if it has one."""
    if signature.batchable or saved_size(signature):
        return ""
    listed = ", ".join(map(str, (*signature.inputs, *signature.outputs)))
    return f"its inputs and outputs have no common batch in their first dimension: {listed}"


def saved_size(signature: Signature) -> int:
    """Return the fixed batch size of a signature (the common first dimension of all inputs), or 0."""
    sizes = {spec.shape[0] if spec.shape else 0 for spec in signature.inputs}
    size = sizes.pop() if len(sizes) == 1 else 0
    if not isinstance(size, int):
        return 0
    fits = all(spec.shape and (spec.shape[0] == size or isinstance(spec.shape[0], str)) for spec in signature.outputs)
    return size if fits else 0


def dependent_rows(alone: Run, together: Run, inputs: tuple[InputSpec, ...], limits: Limits) -> str:
    """Return the reason why rows cannot be batched; empty if results do not depend on the number of rows.

    Args:
        alone: Computes rows one by one.
        together: Computes any number of rows at once.
        inputs: Inputs of both.
        limits: Limits of their difference.
    """
    try:
        # Rows of different magnitudes, to detect a maximum or mean over rows.
        feeds = {name: _scaled(rows) for name, rows in synthetic_samples(inputs, _ROWS, {}, seed=_SEED).items()}
        alone({name: array[:1] for name, array in feeds.items()})
    except GraphkilnError:
        return ""  # no synthetic samples; the proof reports the reason
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
            return f"the result of a row depends on the other rows, {size} at once: {'; '.join(wrong)}"
    return ""


def _scaled(rows: AnyArray) -> AnyArray:
    """Scale rows of floating-point numbers by different factors."""
    if rows.dtype.kind in "biuO":
        return rows
    factors = np.linspace(0.5, 2.0, len(rows)).reshape(-1, *[1] * (rows.ndim - 1))
    scaled: AnyArray = (rows.astype(np.float64) * factors).astype(rows.dtype)
    return scaled


def free_batch(model: onnx_ir.Model) -> onnx_ir.Model:
    """Make the fixed batch of a graph dynamic, in place, without verifying the results.

    Raises:
        ConversionError: A node mixes the samples of the batch, or is not supported.
    """
    raise_opset(model)
    # Infer shapes from the inputs, replacing the symbolic dimensions that exporters invent. Static shapes are kept,
    # because ONNX's inference stops at the first operator without bf16 in the opset.
    declared = [value.shape for value in model.graph.outputs]
    for node in model.graph:
        for value in node.outputs:
            if value.shape is not None and value.shape.is_dynamic():
                value.shape = None
    run_passes(model, (FoldConstants(fills=True),))  # with a fixed batch these depend on constants only
    ShapeInferencePass()(model)
    for value, shape in zip(model.graph.outputs, declared, strict=True):
        value.shape = value.shape or shape
    run_passes(model, (FoldConstants(),))
    ShapeInferencePass()(model)
    note = run_passes(model, (VaryBatch(),)).reports[0].note
    if note:
        raise ConversionError(note)
    return model


def free_and_prove(graph: onnx_ir.Model, alone: Run, inputs: tuple[InputSpec, ...], copy: Path) -> onnx_ir.Model:
    """Make the batch of a graph dynamic, and verify that batched rows match rows computed one by one.

    Args:
        graph: A graph with a fixed batch; changed in place.
        alone: Computes rows one by one, with the fixed batch.
        inputs: Inputs, without the batch.
        copy: File to write the graph to.

    Raises:
        ConversionError: The batch cannot be made dynamic, or rows depend on each other.
        LoweringError: ONNX Runtime cannot run the graph.
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
    """Return the limits for differences between two runs of a graph, by its rounding type."""
    rounding = Rounding.of(model)
    return export_limits(rounding.precision, rounding.depth)
