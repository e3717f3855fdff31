"""Lets nodes compute in fp32, between casts, where a runtime has no kernels for their own type.

So a lowered graph can be proven on any CPU, and one that was saved in bf16 be served by any: values are kept in their
type, sums are done in fp32, as processors with units for the type do, too. ONNX Runtime on a CPU has no bf16 kernels
but for what moves values, not all for fp64, and computes fp16 in fp32 without rounding what passes from one node to the
next: overflow would go unseen.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

import onnx_ir
from onnx_ir.passes.common import ShapeInferencePass

from graphkiln_backend.graph.precision import Precision
from graphkiln_backend.passes.casts import LOW_TYPES, Casts

_MOVES = frozenset(
    {
        *("Cast", "Concat", "Constant", "ConstantOfShape", "Flatten", "Gather", "GatherElements", "GatherND"),
        *("Identity", "Reshape", "ScatterND", "Shape", "Size", "Slice", "Split", "Squeeze", "Transpose", "Unsqueeze"),
    }
)
"""Operators that move values of any type. Tried with ONNX Runtime 1.31."""
_COUNTS = frozenset({"ArgMax", "ArgMin", "NonZero", "Shape", "Size"})
_COMPARISONS = frozenset({"Equal", "Greater", "GreaterOrEqual", "IsInf", "IsNaN", "Less", "LessOrEqual", "Not"})
_FLOATS = (onnx_ir.DataType.FLOAT, onnx_ir.DataType.DOUBLE, *LOW_TYPES.values())


def emulate(model: onnx_ir.Model, target: Precision) -> None:
    """Lets a graph of a lower precision run where only fp32 kernels exist."""
    compute_in_fp32(model, LOW_TYPES[target])


def compute_in_fp32(model: onnx_ir.Model, dtype: onnx_ir.DataType, operators: Collection[str] | None = None) -> int:
    """Lets nodes of a type compute in fp32: their inputs are cast to it, and their outputs back.

    Args:
        model: Changed in place; its types are known.
        dtype: The type.
        operators: Which operators; None for all but those that move values only.

    Returns:
        How many nodes.
    """
    casts, changed = Casts(model, dtype), 0
    for node in list(model.graph):
        if node.op_type in _MOVES if operators is None else node.op_type not in operators:
            continue
        was_low = [value.dtype == dtype for value in node.outputs]
        changed += any(was_low) or any(value is not None and value.dtype == dtype for value in node.inputs)
        casts.raise_inputs(node)
        for value, low in zip(node.outputs, was_low, strict=True):
            if low:
                casts.round_output(node, value)
    return changed


def infer_types(model: onnx_ir.Model) -> list[onnx_ir.Value]:
    """Gives every value of the main graph a type, also where ONNX's own inference gives up.

    It does so for whole graphs, because of one node: a convolution in bf16 before opset 22, say.

    Returns:
        The values whose type is a guess: that of the node's inputs.
    """
    ShapeInferencePass()(model)
    guessed: list[onnx_ir.Value] = []
    for node in model.graph:
        for value in node.outputs:
            if value.dtype is None and (dtype := _result_type(node)) is not None:
                value.dtype = dtype
                guessed.append(value)
    return guessed


def forget_types(values: Iterable[onnx_ir.Value]) -> None:
    """Takes guessed types back: a file may not state them, a quantized operator's output is no float after all."""
    for value in values:
        value.type = None


def _result_type(node: onnx_ir.Node) -> onnx_ir.DataType | None:
    if "to" in node.attributes:
        return onnx_ir.DataType(node.attributes["to"].as_int())
    if "value" in node.attributes:
        return node.attributes["value"].as_tensor().dtype
    if node.op_type in _COUNTS:
        return onnx_ir.DataType.INT64
    if node.op_type in _COMPARISONS:
        return onnx_ir.DataType.BOOL
    types = [value.dtype for value in node.inputs if value is not None]
    return next((dtype for dtype in types if dtype in _FLOATS), types[0] if types else None)
