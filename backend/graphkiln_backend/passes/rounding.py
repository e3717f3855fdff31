"""Rounding to 16 bits in a graph: its type, and how often in a row."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

import onnx_ir
from onnx_ir.passes.common import ShapeInferencePass

from graphkiln_backend.graph.precision import Precision
from graphkiln_backend.passes.precision import LOW_TYPES, Casts

# Lets nodes compute in fp32, between casts, where a runtime has no kernels for their own type.
#
# So a lowered graph can be proven on any CPU, and one that was saved in bf16 be served by any: values are kept in their
# type, sums are done in fp32, as processors with units for the type do, too. ONNX Runtime on a CPU has no bf16 kernels
# but for what moves values, not all for fp64, and computes fp16 in fp32 without rounding what passes from one node to
# the next: overflow would go unseen.

# Operators that move values of any type. Tried with ONNX Runtime 1.31.
_MOVES = frozenset(
    {
        *("Cast", "Concat", "Constant", "ConstantOfShape", "Flatten", "Gather", "GatherElements", "GatherND"),
        *("Identity", "Reshape", "ScatterND", "Shape", "Size", "Slice", "Split", "Squeeze", "Transpose", "Unsqueeze"),
    }
)
_COUNTS = frozenset({"ArgMax", "ArgMin", "NonZero", "Shape", "Size"})
_COMPARISONS = frozenset({"Equal", "Greater", "GreaterOrEqual", "IsInf", "IsNaN", "Less", "LessOrEqual", "Not"})
_FLOATS = (onnx_ir.DataType.FLOAT, onnx_ir.DataType.DOUBLE, *LOW_TYPES.values())


def emulate(model: onnx_ir.Model, target: Precision) -> None:
    """Let a graph of a lower precision run where only fp32 kernels exist."""
    compute_in_fp32(model, LOW_TYPES[target])


def compute_in_fp32(model: onnx_ir.Model, dtype: onnx_ir.DataType, operators: Collection[str] | None = None) -> int:
    """Let nodes of a type compute in fp32: cast their inputs to it, and their outputs back.

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
    """Give every value of the main graph a type, also where ONNX's own inference gives up.

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
    """Remove guessed types: a file must not state them, and the output of a quantized operator is no float."""
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


# Operators that round nothing: each of their outputs is an input, or a constant.
_COPIES = frozenset(
    {
        *("Concat", "DepthToSpace", "Expand", "Flatten", "Gather", "GatherElements", "GatherND"),
        *("Identity", "Pad", "Reshape", "Shape", "Slice", "SpaceToDepth", "Split", "Squeeze", "Tile", "Transpose"),
        *("Unsqueeze", "Where", "Constant", "ConstantOfShape", "Max", "Min", "Relu", "MaxPool", "ReduceMax", "TopK"),
    }
)
_LOW = frozenset(LOW_TYPES.values())


@dataclass(frozen=True, kw_only=True, slots=True)
class Rounding:
    """Rounding of the values that a graph computes.

    Attributes:
        precision: What it computes in.
        depth: Most nodes in a row that round to 16 bits.
    """

    precision: Precision
    depth: int

    @classmethod
    def of(cls, model: onnx_ir.Model) -> Rounding:
        """Read it from a graph. Types are inferred; guesses do not stay in the graph."""
        guessed = infer_types(model)
        rounding = cls(precision=computed_precision(model), depth=rounding_depth(model))
        forget_types(guessed)
        return rounding


def computed_precision(model: onnx_ir.Model) -> Precision:
    """The coarsest floating-point type that a graph computes in: bf16, fp16, or else fp32.

    Args:
        model: A graph whose types are known. Types of inputs, outputs and weights alone say nothing: what is only
            returned in 16 bits was computed in more.
    """
    results = set(model.graph.outputs)
    types = {
        value.dtype
        for node in model.graph
        for value in node.outputs
        if _rounds(node) and not (node.op_type == "Cast" and value in results)
    }
    halves = [precision for precision in (Precision.BF16, Precision.FP16) if LOW_TYPES[precision] in types]
    return halves[0] if halves else Precision.FP32


def rounding_depth(model: onnx_ir.Model) -> int:
    """Most nodes in a row of the main graph that round to 16 bits."""
    depths: dict[onnx_ir.Value, int] = {}
    for node in model.graph:
        before = max((depths.get(value, 0) for value in node.inputs if value is not None), default=0)
        depths.update(dict.fromkeys(node.outputs, before + _rounds(node)))
    return max(depths.values(), default=0)


def _rounds(node: onnx_ir.Node) -> bool:
    return node.op_type not in _COPIES and any(value.dtype in _LOW for value in node.outputs)
