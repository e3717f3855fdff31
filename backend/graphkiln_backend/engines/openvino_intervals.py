"""Intervals of what OpenVINO's operations compute from intervals; see `openvino_integers`."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import openvino

LIMIT = 1 << 31
"""Integers of 32 bits are less than this, and at least its negative."""
LONGEST = 1 << 16
"""Taken for the length of a dimension that varies."""
ANYTHING = (-math.inf, math.inf)


@dataclass(frozen=True, slots=True)
class Interval:
    """Between what a value lies, and the inputs of the graph from which it is computed."""

    least: float
    most: float
    sources: frozenset[str] = frozenset()

    @property
    def fits(self) -> bool:
        """Whether all of it is integers of 32 bits."""
        return self.least >= -LIMIT and self.most < LIMIT

    @property
    def size(self) -> float:
        """The largest of it without its sign."""
        return max(abs(self.least), abs(self.most))


Rule = Callable[[openvino.Node, Sequence[Interval]], tuple[float, float]]


def hull(values: Sequence[Interval], *, known: bool = True) -> tuple[float, float]:
    """What holds all of some intervals, or anything where that says nothing of the result."""
    if not values or not known:
        return ANYTHING
    return min(value.least for value in values), max(value.most for value in values)


def _products(left: Interval, right: Interval) -> tuple[float, float]:
    found = [_times(a, b) for a in (left.least, left.most) for b in (right.least, right.most)]
    return min(found), max(found)


def _times(left: float, right: float) -> float:
    return left * right if left and right else 0.0  # also of an infinity


def _summed(operation: openvino.Node, inputs: Sequence[Interval]) -> tuple[float, float]:
    count = _count(operation)
    return min(inputs[0].least * count, inputs[0].least), max(inputs[0].most * count, inputs[0].most)


def _summed_sizes(operation: openvino.Node, inputs: Sequence[Interval]) -> tuple[float, float]:
    return 0, inputs[0].size * _count(operation)


def _scattered(operation: openvino.Node, inputs: Sequence[Interval]) -> tuple[float, float]:
    """What is written into a tensor, or added to it."""
    replaces = operation.get_attributes().get("reduction", "none") in {"none", "min", "max"}
    return hull((inputs[0], inputs[2]), known=replaces)


def _count(operation: openvino.Node) -> int:
    """How many numbers are added up along the axes of the second input."""
    shape, axes = operation.get_input_partial_shape(0), operation.input_value(1).get_node()
    if shape.rank.is_dynamic or axes.get_type_name() != "Constant":
        return LONGEST
    return min(math.prod(_length(shape[int(axis)]) for axis in axes.get_data().ravel()), LONGEST)


def _length(dim: openvino.Dimension) -> int:
    return int(dim.get_length()) if dim.is_static else LONGEST


def _matrix_product(operation: openvino.Node, inputs: Sequence[Interval]) -> tuple[float, float]:
    least, most = _products(inputs[0], inputs[1])
    shape, transposed = operation.get_input_partial_shape(0), operation.get_attributes()["transpose_a"]
    flat = shape.rank.is_dynamic or len(shape) < 1 + transposed
    count = LONGEST if flat else _length(shape[-2 if transposed else -1])
    return min(least * count, least), max(most * count, most)


def _power(_: openvino.Node, inputs: Sequence[Interval]) -> tuple[float, float]:
    base, exponent = inputs
    if base.size <= 1:
        return -1, 1
    most = math.inf if exponent.most > 64 or math.isinf(base.size) else base.size ** max(exponent.most, 0)
    return (0 if base.least >= 0 else -most), most


def _shifted(_: openvino.Node, inputs: Sequence[Interval]) -> tuple[float, float]:
    value, by = inputs
    factor = 2.0 ** max(by.most, 0) if by.most <= 64 else math.inf
    return min(_times(value.least, factor), value.least), max(_times(value.most, factor), value.most)


def _remainder(_: openvino.Node, inputs: Sequence[Interval]) -> tuple[float, float]:
    """Of the dividend's sign."""
    size = min(inputs[0].size, inputs[1].size)
    return (0 if inputs[0].least >= 0 else -size), (0 if inputs[0].most <= 0 else size)


def _floored_remainder(_: openvino.Node, inputs: Sequence[Interval]) -> tuple[float, float]:
    """Of the divisor's sign."""
    size = inputs[1].size
    return (0 if inputs[1].least >= 0 else -size), (0 if inputs[1].most <= 0 else size)


def _clamped(operation: openvino.Node, inputs: Sequence[Interval]) -> tuple[float, float]:
    attributes = operation.get_attributes()
    low, high = float(attributes["min"]), float(attributes["max"])
    return min(max(inputs[0].least, low), high), max(min(inputs[0].most, high), low)


_BITS = ("BitwiseAnd", "BitwiseOr", "BitwiseXor", "BitwiseNot")
MOVING = frozenset(
    (
        *("Parameter", "Constant", "Result", "Identity", "Convert", "Reshape", "Broadcast", "Tile", "Unsqueeze"),
        *("Squeeze", "Transpose", "Concat", "Select", "Gather", "GatherND", "GatherElements", "Slice", "StridedSlice"),
        *("Split", "VariadicSplit", "Pad", "Roll", "ReverseSequence", "TopK", "If", "Loop", "TensorIterator"),
        *("ScatterUpdate", "ScatterNDUpdate", "ScatterElementsUpdate", "ShapeOf", "OneHot", *_BITS),
    )
)
"""Operations that return numbers or bits that they are given; what loops and branches compute is anything."""
CARRYING = MOVING - {"If", "Loop", "TensorIterator", *_BITS} | {
    *("ReduceMax", "ReduceMin", "ReduceMean", "Floor", "Ceiling", "Round", "Relu")
}
"""Operations that return numbers no larger than those that they are given."""
RULES: dict[str, Rule] = {
    "Add": lambda _, v: (v[0].least + v[1].least, v[0].most + v[1].most),
    "Subtract": lambda _, v: (v[0].least - v[1].most, v[0].most - v[1].least),
    "Multiply": lambda _, v: _products(v[0], v[1]),
    "SquaredDifference": lambda _, v: (0, (v[0].size + v[1].size) ** 2),
    "Divide": lambda _, v: (-v[0].size, v[0].size),
    "Abs": lambda _, v: (0, v[0].size),
    "Negative": lambda _, v: (-v[0].most, -v[0].least),
    "Minimum": lambda _, v: (min(v[0].least, v[1].least), min(v[0].most, v[1].most)),
    "Maximum": lambda _, v: (max(v[0].least, v[1].least), max(v[0].most, v[1].most)),
    "Sign": lambda _, __: (-1, 1),
    **dict.fromkeys(("Sigmoid", "Softmax", "HardSigmoid"), lambda _, __: (0, 1)),
    "Range": lambda _, v: (min(v[0].least, v[1].least), max(v[0].most, v[1].most)),
    "Clamp": _clamped,
    "Power": _power,
    "BitwiseLeftShift": _shifted,
    "Mod": _remainder,
    "FloorMod": _floored_remainder,
    **dict.fromkeys(("ReduceSum", "CumSum"), _summed),
    **dict.fromkeys(("ReduceL1", "ReduceL2"), _summed_sizes),
    **dict.fromkeys(("ScatterUpdate", "ScatterNDUpdate", "ScatterElementsUpdate"), _scattered),
    "MatMul": _matrix_product,
    "ReduceProd": lambda _, v: (-1, 1) if v[0].size <= 1 else ANYTHING,
    "Einsum": lambda _, __: ANYTHING,
}
