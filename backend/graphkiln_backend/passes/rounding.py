"""Emulation of 16-bit types with fp32 kernels, and the depth of 16-bit rounding in a graph."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

import onnx_ir
from onnx_ir.passes.common import ShapeInferencePass

from graphkiln_backend.graph.precision import Precision
from graphkiln_backend.passes.precision import LOW_TYPES, Casts

# Emulation inserts casts around nodes that lack kernels for a type, so that they compute in fp32. Values are stored in
# the type and sums accumulate in fp32, as in hardware with units for the type. This lets any CPU prove a lowered graph,
# and serve one that was saved in bf16. ONNX Runtime on CPU has bf16 kernels only for data movement, lacks some for
# fp64, and computes fp16 in fp32 without rounding between nodes, which would hide overflow.

# Data-movement operators with kernels for all types. Verified with ONNX Runtime 1.31.
_MOVES = frozenset(
    {
        *("Cast", "Concat", "Constant", "ConstantOfShape", "Flatten", "Gather", "GatherElements", "GatherND"),
        *("Identity", "Reshape", "ScatterND", "Shape", "Size", "Slice", "Split", "Squeeze", "Transpose", "Unsqueeze"),
    }
)
_COUNTS = frozenset({"ArgMax", "ArgMin", "NonZero", "Shape", "Size"})
_COMPARISONS = frozenset({"Equal", "Greater", "GreaterOrEqual", "IsInf", "IsNaN", "Less", "LessOrEqual", "Not"})
_FLOATS = (onnx_ir.DataType.FLOAT, onnx_ir.DataType.DOUBLE, *LOW_TYPES.values())
# Operators that do not round: their outputs are inputs or constants.
_COPIES = frozenset(
    {
        *("Concat", "DepthToSpace", "Expand", "Flatten", "Gather", "GatherElements", "GatherND"),
        *("Identity", "Pad", "Reshape", "Shape", "Slice", "SpaceToDepth", "Split", "Squeeze", "Tile", "Transpose"),
        *("Unsqueeze", "Where", "Constant", "ConstantOfShape", "Max", "Min", "Relu", "MaxPool", "ReduceMax", "TopK"),
    }
)
# Beginnings of operators that round activations, or compute with rounded ones.
_QUANTIZING = ("QuantizeLinear", "DynamicQuantize", "QLinear", "QAttention", "QGemm", "ConvInteger", "MatMulInteger")
_LOW = frozenset(LOW_TYPES.values())


def emulate(model: onnx_ir.Model, target: Precision) -> None:
    """Make a graph of a lower precision run on fp32 kernels, in place."""
    compute_in_fp32(model, LOW_TYPES[target])


def compute_in_fp32(model: onnx_ir.Model, dtype: onnx_ir.DataType, operators: Collection[str] | None = None) -> int:
    """Make nodes of a type compute in fp32: cast their inputs to fp32 and their outputs back.

    Args:
        model: A graph with known types; changed in place.
        dtype: Element type of the nodes to change.
        operators: Operator types to change; None for all except data movement.

    Returns:
        Number of nodes changed.
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
    """Infer the type of every value of the main graph, including those that ONNX's inference does not reach.

    ONNX's inference fails for the whole graph at a single unsupported node, such as a bf16 convolution before opset 22.

    Returns:
        Values whose type is a guess, taken from the inputs of their node.
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
    """Remove guessed types, which must not be saved: they are wrong for outputs of quantized operators."""
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


@dataclass(frozen=True, kw_only=True, slots=True)
class Rounding:
    """Rounding behavior of a graph.

    Attributes:
        precision: Coarsest floating-point type of the computation.
        depth: Largest number of nodes on a path that round to 16 bits.
    """

    precision: Precision
    depth: int

    @classmethod
    def of(cls, model: onnx_ir.Model) -> Rounding:
        """Analyze a graph. Inferred types are kept, guessed ones are removed."""
        guessed = infer_types(model)
        rounding = cls(precision=computed_precision(model), depth=rounding_depth(model))
        forget_types(guessed)
        return rounding


def computed_precision(model: onnx_ir.Model) -> Precision:
    """Return the coarsest floating-point type that a graph computes in: bf16, fp16, or fp32.

    Types of inputs, outputs and weights are ignored: a result may be computed in fp32 and only returned in 16 bits.

    Args:
        model: A graph with known types.
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


def has_quantized_activations(model: onnx_ir.Model) -> bool:
    """Return True if a graph rounds activations to integers; engines round those otherwise than a session without them.

    Weights of few bits alone are multiplied in fp32.
    """
    return any(node.op_type.startswith(_QUANTIZING) for node in model.graph.all_nodes())


def rounding_depth(model: onnx_ir.Model) -> int:
    """Return the largest number of nodes on a path of the main graph that round to 16 bits."""
    depths: dict[onnx_ir.Value, int] = {}
    for node in model.graph:
        before = max((depths.get(value, 0) for value in node.inputs if value is not None), default=0)
        depths.update(dict.fromkeys(node.outputs, before + _rounds(node)))
    return max(depths.values(), default=0)


def _rounds(node: onnx_ir.Node) -> bool:
    return node.op_type not in _COPIES and any(value.dtype in _LOW for value in node.outputs)
