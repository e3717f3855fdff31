"""How large the integers become that a graph computes from a request: OpenVINO takes 32 bits of them, or FP32.

What it only moves may take 32 bits. What it computes with may take the 24 bits that FP32 holds exactly: seen with
2026.4 for quotients, remainders, sums and products of matrices, and for a sum and the comparison after it.

Each value gets an interval, from the inputs to the outputs. Where one that is computed from what a request holds may be
larger, and that shows (in an output, a comparison, a float), the inputs that it comes from are limited: a sum of a
token id and an offset takes all ids below 8 million. Where that would leave less than ids and indices need, as a
product of two inputs does, the graph is refused.

What only chooses (indices, shapes, ends of slices) may be cut off. Positions and sizes are as large as a tensor is.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import openvino

from graphkiln_backend.graph.errors import LoweringError

# Intervals of what OpenVINO's operations compute from intervals; see `openvino_integers`.

LIMIT = 1 << 31  # integers of 32 bits are less than this, and at least its negative
LONGEST = 1 << 16  # taken for the length of a dimension that varies
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
# Operations that return numbers or bits that they are given; what loops and branches compute is anything.
MOVING = frozenset(
    (
        *("Parameter", "Constant", "Result", "Identity", "Convert", "Reshape", "Broadcast", "Tile", "Unsqueeze"),
        *("Squeeze", "Transpose", "Concat", "Select", "Gather", "GatherND", "GatherElements", "Slice", "StridedSlice"),
        *("Split", "VariadicSplit", "Pad", "Roll", "ReverseSequence", "TopK", "If", "Loop", "TensorIterator"),
        *("ScatterUpdate", "ScatterNDUpdate", "ScatterElementsUpdate", "ShapeOf", "OneHot", *_BITS),
    )
)
# Operations that return numbers no larger than those that they are given.
CARRYING = MOVING - {"If", "Loop", "TensorIterator", *_BITS} | {
    *("ReduceMax", "ReduceMin", "ReduceMean", "Floor", "Ceiling", "Round", "Relu")
}
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


_FILE = "limits.json"
_EXACT = 1 << 24  # FP32 holds all integers up to this
# A graph whose input may hold no more is refused: vocabularies and tables are smaller, prices and times are not.
_LEAST_LIMIT = 1 << 20
# An input that is called a mask holds 0 and 1: sums of it, and DeBERTa's product of it with itself, are small.
_LEAST_OF_MASK = 2
_POSITIONS = (-1.0, float(1 << 20))
_WIDE = frozenset((openvino.Type.i64, openvino.Type.u64))
_WORDS = frozenset((openvino.Type.i32, openvino.Type.u32))
_OF_TYPE: dict[openvino.Type, tuple[float, float]] = {
    openvino.Type.boolean: (0, 1),
    openvino.Type.u8: (0, 255),
    openvino.Type.i8: (-128, 127),
    openvino.Type.u16: (0, 65535),
    openvino.Type.i16: (-32768, 32767),
    openvino.Type.i32: (-LIMIT, LIMIT - 1),
    openvino.Type.u32: (0, 2 * LIMIT - 1),
}
_FLOATS = frozenset((openvino.Type.f16, openvino.Type.f32, openvino.Type.f64))
# Operations, and which of their inputs choose or say how much, by index.
_CHOOSING = {
    **dict.fromkeys(("Reshape", "Broadcast", "Tile", "Unsqueeze", "Squeeze", "Transpose", "TopK", "CumSum"), (1, 2)),
    **dict.fromkeys(("Gather", "GatherND", "GatherElements", "VariadicSplit", "Split", "Roll", "Pad"), (1, 2)),
    **dict.fromkeys(("ScatterUpdate", "ScatterNDUpdate", "ScatterElementsUpdate"), (1, 3)),
    **dict.fromkeys(("Slice", "StridedSlice", "Interpolate"), (1, 2, 3, 4)),
    **dict.fromkeys(("ReduceSum", "ReduceProd", "ReduceMax", "ReduceMin", "ReduceMean"), (1,)),
    **dict.fromkeys(("ReduceL1", "ReduceL2", "ReverseSequence"), (1,)),
    "OneHot": (0, 1),
    "Range": (0, 1, 2),
}
_POSITIONS_OF = frozenset(
    ("MaxPool", "ShapeOf", "TopK", "NonZero", "NonMaxSuppression", "Unique", "Bucketize", "SearchSorted")
)
_NESTED = frozenset(("If", "Loop", "TensorIterator"))  # operations whose graphs are not looked into
# Operations that return other integers than they are given, beside those with a rule: a float becomes one.
_COMPUTING = _NESTED | {"Convert"}


def find_limits(model: openvino.Model) -> dict[str, int]:
    """How large the numbers of each input may be, so that no integer that shows leaves 32 bits.

    Args:
        model: As it was read, before it is compiled.

    Returns:
        Limits by name of the input, where they are less than `LIMIT`.

    Raises:
        LoweringError: They would be less than a token id or an index needs.
    """
    operations = model.get_ordered_ops()
    shown = _find_shown(operations)
    limits = {_name(each): LIMIT for each in operations if each.get_type_name() == "Parameter"}
    while found := _find_overflow(operations, shown, limits):
        operation, sources = found
        limited = {name: limits[name] // 2 for name in sources}
        if any(limit < _least_limit(name) for name, limit in limited.items()):
            raise LoweringError(
                "OpenVINO computes integers in 32 bits or FP32",
                attempts=(f"{operation.get_type_name()} '{operation.get_friendly_name()}' may need larger ones",),
                hint="set engine: onnxruntime",
            )
        limits |= limited
    return {name: limit for name, limit in limits.items() if limit < LIMIT}


def _least_limit(name: str) -> int:
    return _LEAST_OF_MASK if "mask" in name.lower() else _LEAST_LIMIT


def write_limits(folder: Path, limits: Mapping[str, int]) -> None:
    """Keeps the limits beside what was compiled.

    Raises:
        OSError: They cannot be written.
    """
    (folder / _FILE).write_text(json.dumps(dict(limits)))


def read_limits(folder: Path) -> dict[str, int] | None:
    """The limits of what was compiled; None where they are not known.

    Raises:
        OSError: They cannot be read.
    """
    path = folder / _FILE
    return {str(name): int(limit) for name, limit in json.loads(path.read_bytes()).items()} if path.exists() else None


def _find_overflow(
    operations: Iterable[openvino.Node], shown: set[str], limits: Mapping[str, int]
) -> tuple[openvino.Node, frozenset[str]] | None:
    """The first operation that may be given or may compute integers that are too large, and where these come from."""
    values: dict[tuple[str, int], Interval] = {}
    words: set[str] = set()
    for operation in operations:
        inputs = [values[_key(each.get_source_output())] for each in operation.inputs()]
        outputs = [_evaluate(operation, output, inputs, limits) for output in operation.outputs()]
        if operation.get_type_name() == "Parameter" and operation.get_output_element_type(0) in _WORDS:
            words.add(_name(operation))
        elif operation.get_name() in shown:
            for value in _too_large(operation, inputs, outputs, words):
                return operation, value.sources
        for output, value in zip(operation.outputs(), outputs, strict=True):
            values[_key(output)] = value if value.fits or not _is_integer(output) else _clipped(value)
    return None


def _too_large(
    operation: openvino.Node, inputs: Sequence[Interval], outputs: Sequence[Interval], words: set[str]
) -> Iterator[Interval]:
    """What an operation does not compute exactly; of 32 bits, only what comes from such an input of the graph.

    (Products of quantized numbers are sums of 32 bits, too, and become floats.)
    """
    kind = operation.get_type_name()
    bound = LIMIT if kind in MOVING or kind in _POSITIONS_OF else _EXACT
    choosing = _CHOOSING.get(kind, ())
    carried = [each for each in zip(operation.inputs(), inputs, strict=True) if each[0].get_index() not in choosing]
    computed = zip(operation.outputs(), outputs, strict=True) if kind in RULES or kind in _COMPUTING else ()
    for port, value in (*carried, *computed):
        counts = port.get_element_type() in _WIDE or (port.get_element_type() in _WORDS and value.sources & words)
        if counts and value.sources and (value.least < -bound or value.most >= bound):
            yield value


def _evaluate(
    operation: openvino.Node, output: openvino.Output, inputs: Sequence[Interval], limits: Mapping[str, int]
) -> Interval:
    kind = operation.get_type_name()
    if kind == "Constant":
        return _constant(operation)
    if kind == "Parameter":
        return _parameter(operation, output, limits[_name(operation)])
    if kind in _POSITIONS_OF and _is_integer(output):
        return Interval(*_POSITIONS)
    sources = frozenset[str]().union(*(value.sources for value in inputs))
    choosing = _CHOOSING.get(kind, ())
    carried = [value for index, value in enumerate(inputs) if index not in choosing] or list(inputs)
    least, most = RULES[kind](operation, inputs) if kind in RULES else hull(carried, known=kind in CARRYING)
    low, high = _range_of(output.get_element_type(), any_integer=kind in RULES or kind in CARRYING or kind in _NESTED)
    return Interval(least, most, sources) if low <= least and most <= high else Interval(low, high, sources)


def _range_of(element: openvino.Type, *, any_integer: bool) -> tuple[float, float]:
    """What a type holds; integers of 64 bits that nobody has computed with are as small as those that came in."""
    if element in _WIDE and not any_integer:
        return -LIMIT, LIMIT - 1
    return _OF_TYPE.get(element, ANYTHING)


def _constant(operation: openvino.Node) -> Interval:
    """The interval of numbers that integers are computed with; weights are of no interest."""
    element, size = operation.get_output_element_type(0), math.prod(operation.get_output_shape(0))
    if not size or not (element in _WIDE or element in _OF_TYPE or (element in _FLOATS and size <= LONGEST)):
        return Interval(*ANYTHING)
    data = operation.get_data()
    return Interval(float(np.nanmin(data)), float(np.nanmax(data)))


def _parameter(operation: openvino.Node, output: openvino.Output, limit: int) -> Interval:
    low, high = _OF_TYPE.get(output.get_element_type(), ANYTHING)
    if output.get_element_type() == openvino.Type.u64:
        low = 0.0
    if _is_integer(output):
        low, high = max(low, -limit), min(high, limit - 1)
    return Interval(low, high, frozenset((_name(operation),)))


def _key(output: openvino.Output) -> tuple[str, int]:
    return output.get_node().get_name(), output.get_index()


def _name(parameter: openvino.Node) -> str:
    return str(parameter.get_friendly_name())


def _is_integer(output: openvino.Output) -> bool:
    return output.get_element_type() in _WIDE or output.get_element_type() in _OF_TYPE


def _clipped(value: Interval) -> Interval:
    return Interval(max(value.least, -LIMIT), min(value.most, LIMIT - 1), value.sources)


def _find_shown(operations: Sequence[openvino.Node]) -> set[str]:
    """The operations whose exact values matter: not those that only choose."""
    shown: set[str] = set()
    for operation in reversed(operations):
        if any(_shows(each, shown) for output in operation.outputs() for each in output.get_target_inputs()):
            shown.add(operation.get_name())
    return shown


def _shows(target: openvino.Input, shown: set[str]) -> bool:
    user = target.get_node()
    if target.get_index() in _CHOOSING.get(user.get_type_name(), ()):
        return False
    stays = user.get_type_name() != "Result" and all(each.get_element_type() in _WIDE for each in user.outputs())
    return user.get_name() in shown if stays else True
