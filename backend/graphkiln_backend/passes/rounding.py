"""Where a graph rounds what it computes to 16 bits, and how often in a row."""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir

from graphkiln_backend.graph.precision import Precision
from graphkiln_backend.passes.casts import LOW_TYPES
from graphkiln_backend.passes.emulation import forget_types, infer_types

_COPIES = frozenset(
    {
        *("Concat", "DepthToSpace", "Expand", "Flatten", "Gather", "GatherElements", "GatherND"),
        *("Identity", "Pad", "Reshape", "Shape", "Slice", "SpaceToDepth", "Split", "Squeeze", "Tile", "Transpose"),
        *("Unsqueeze", "Where", "Constant", "ConstantOfShape", "Max", "Min", "Relu", "MaxPool", "ReduceMax", "TopK"),
    }
)
"""Operators that round nothing: each of their outputs is an input, or a constant."""
_LOW = frozenset(LOW_TYPES.values())


@dataclass(frozen=True, kw_only=True, slots=True)
class Rounding:
    """How a graph rounds what it computes.

    Attributes:
        precision: What it computes in.
        depth: Most nodes in a row that round to 16 bits.
    """

    precision: Precision
    depth: int

    @classmethod
    def of(cls, model: onnx_ir.Model) -> Rounding:
        """Of a graph, whose types are inferred; guesses do not stay in it."""
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
