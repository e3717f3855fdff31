"""Limits of a graph's inputs within which OpenVINO computes integers exactly, although it uses 32 bits or FP32.

Integers that are only moved may have 32 bits. Integers in arithmetic may have the 24 bits that FP32 represents exactly:
observed with 2026.4 for quotients, remainders, sums and matrix products, and for a sum followed by a comparison.

Each value gets an upper bound of its magnitude, from inputs to outputs. If a value computed from a request may exceed
the exact range and is visible (in an output, a comparison, a float), the inputs that it depends on are limited, and
each request is checked against these limits: a sum of a token id and an offset accepts all ids below 8 million. If the
limit would be lower than ids and indices need, as for a product of two inputs, the graph is refused. Values that only
select (indices, shapes, ends of slices) may be truncated. Positions and sizes are bounded by the size of a tensor.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import openvino

from graphkiln_backend.graph.errors import LoweringError

LIMIT = 1 << 31  # exclusive limit of 32-bit integers
_EXACT = 1 << 24  # FP32 represents all integers up to this
_LEAST_LIMIT = 1 << 20  # lowest acceptable limit: vocabularies and tables are smaller, prices and times are not
_LEAST_OF_MASK = 2  # for inputs named mask, which are 0 or 1: their sums, and DeBERTa's product of a mask, are small
_POSITIONS = float(1 << 20)
_LONGEST = 1 << 16  # assumed length of a dynamic dimension

WIDE = frozenset((openvino.Type.i64, openvino.Type.u64))
_WORDS = frozenset((openvino.Type.i32, openvino.Type.u32))
_SIZES: dict[openvino.Type, float] = {
    openvino.Type.boolean: 1,
    openvino.Type.u8: 255,
    openvino.Type.i8: 128,
    openvino.Type.u16: 65535,
    openvino.Type.i16: 32768,
    openvino.Type.i32: LIMIT,
    openvino.Type.u32: 2 * LIMIT,
}
INTEGERS = WIDE | {each for each in _SIZES if each != openvino.Type.boolean}
_WHOLE = INTEGERS | {openvino.Type.boolean}
_FLOATS = frozenset((openvino.Type.f16, openvino.Type.f32, openvino.Type.f64))

# Indices of the inputs of operations that select or give sizes.
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
POSITIONS_OF = frozenset(
    (
        *("MaxPool", "ShapeOf", "TopK", "NonZero", "NonMaxSuppression", "Unique", "Bucketize", "SearchSorted"),
        "Multinomial",
    )
)
# Operations whose outputs are values of their inputs.
_RETURNING = frozenset(
    (
        *("Parameter", "Constant", "Result", "Identity", "Convert", "Reshape", "Broadcast", "Tile", "Unsqueeze"),
        *("Squeeze", "Transpose", "Concat", "Select", "Gather", "GatherND", "GatherElements", "Slice", "StridedSlice"),
        *("Split", "VariadicSplit", "Pad", "Roll", "ReverseSequence", "TopK", "ShapeOf", "OneHot"),
        *("ScatterUpdate", "ScatterNDUpdate", "ScatterElementsUpdate"),
    )
)
_BITS = frozenset(("BitwiseAnd", "BitwiseOr", "BitwiseXor", "BitwiseNot"))
SUBGRAPHS = frozenset(("If", "Loop", "TensorIterator"))
IN_FLOATS = frozenset(("Select", "ReverseSequence", "Pad"))  # move integers as FP32
# Operations exact for 32-bit integers. Those with subgraphs, which are not analyzed, may return any value.
MOVING = (_RETURNING | POSITIONS_OF | _BITS | SUBGRAPHS) - IN_FLOATS
# Operations whose outputs are no larger than their inputs.
_CARRYING = _RETURNING | {
    *("ReduceMax", "ReduceMin", "Floor", "Ceiling", "Round", "Relu"),
    *("Divide", "Abs", "Negative", "Range", "BitwiseRightShift"),
}


class _Value(NamedTuple):
    size: float  # the largest number without its sign
    sources: frozenset[str] = frozenset()  # inputs of the graph from which it is computed


def find_limits(model: openvino.Model) -> dict[str, int]:
    """Find the limit of each input within which all visible integers are exact.

    Args:
        model: The model as read, before it is compiled.

    Returns:
        Exclusive limits of absolute values by input name, if less than `LIMIT`.

    Raises:
        LoweringError: A limit would be lower than token ids or indices need.
    """
    operations = model.get_ordered_ops()
    visible = _find_visible(operations)
    limits = {str(each.get_friendly_name()): LIMIT for each in operations if each.get_type_name() == "Parameter"}
    while found := _find_overflow(operations, visible, limits):
        operation, sources = found
        for name in sources:
            limits[name] //= 2
            if limits[name] < (_LEAST_OF_MASK if "mask" in name.lower() else _LEAST_LIMIT):
                raise LoweringError(
                    "OpenVINO computes integers in 32 bits or FP32",
                    attempts=(f"{operation.get_type_name()} '{operation.get_friendly_name()}' may need larger ones",),
                    hint="set engine: onnxruntime",
                )
    return {name: limit for name, limit in limits.items() if limit < LIMIT}


def find_sizes(operations: Iterable[openvino.Node]) -> dict[str, float]:
    """Bound the magnitudes of results before they are stored in their types, by names of operations."""
    values: dict[tuple[str, int], _Value] = {}
    sizes: dict[str, float] = {}
    limits: dict[str, int] = defaultdict(lambda: LIMIT)
    for operation in operations:
        inputs = [values[_key(each.get_source_output())] for each in operation.inputs()]
        sizes[operation.get_name()] = _result(operation, inputs)
        for output in operation.outputs():
            values[_key(output)] = _evaluate(operation, output, inputs, limits)
    return sizes


def _find_visible(operations: Sequence[openvino.Node]) -> set[str]:
    """Return the operations whose values are visible, unlike those that are only used as indices and sizes."""
    visible: set[str] = set()
    for operation in reversed(operations):
        if any(_makes_visible(each, visible) for output in operation.outputs() for each in output.get_target_inputs()):
            visible.add(operation.get_name())
    return visible


def _makes_visible(target: openvino.Input, visible: set[str]) -> bool:
    """Return true if a value that is read here is visible in an output, a comparison, or a float."""
    user = target.get_node()
    if target.get_index() in _CHOOSING.get(user.get_type_name(), ()):
        return False
    stays = user.get_type_name() != "Result" and all(each.get_element_type() in WIDE for each in user.outputs())
    return user.get_name() in visible if stays else True


def _find_overflow(
    operations: Iterable[openvino.Node], visible: set[str], limits: Mapping[str, int]
) -> tuple[openvino.Node, frozenset[str]] | None:
    """Return the first operation whose inputs or outputs may be too large, and the graph inputs that they depend on."""
    values: dict[tuple[str, int], _Value] = {}
    words: set[str] = set()
    for operation in operations:
        inputs = [values[_key(each.get_source_output())] for each in operation.inputs()]
        outputs = [_evaluate(operation, output, inputs, limits) for output in operation.outputs()]
        if operation.get_type_name() == "Parameter" and operation.get_output_element_type(0) in _WORDS:
            words.add(str(operation.get_friendly_name()))
        elif operation.get_name() in visible:
            for value in _too_large(operation, inputs, outputs, words):
                return operation, value.sources
        for output, value in zip(operation.outputs(), outputs, strict=True):
            cut_off = output.get_element_type() in _WHOLE and value.size > LIMIT
            values[_key(output)] = value._replace(size=float(LIMIT)) if cut_off else value
    return None


def _too_large(
    operation: openvino.Node, inputs: Sequence[_Value], outputs: Sequence[_Value], words: set[str]
) -> Iterator[_Value]:
    """Yield integers from a request that an operation does not compute exactly.

    32-bit integers only count if they come from a 32-bit input: products of quantized values are 32-bit sums as well,
    and become floats.
    """
    kind = operation.get_type_name()
    to_boolean = openvino.Type.boolean in {each.get_element_type() for each in operation.outputs()}
    bound = LIMIT if kind in MOVING and not to_boolean else _EXACT  # not even all of 32 bits become true
    choosing = _CHOOSING.get(kind, ())
    carried = [each for each in zip(operation.inputs(), inputs, strict=True) if each[0].get_index() not in choosing]
    computed = zip(operation.outputs(), outputs, strict=True) if kind not in _KEEPING else ()
    for port, value in (*carried, *computed):
        counts = port.get_element_type() in WIDE or (port.get_element_type() in _WORDS and value.sources & words)
        if counts and value.sources and value.size > bound:
            yield value


def _evaluate(
    operation: openvino.Node, output: openvino.Output, inputs: Sequence[_Value], limits: Mapping[str, int]
) -> _Value:
    kind, element = operation.get_type_name(), output.get_element_type()
    if kind == "Constant":
        return _Value(_size_of_constant(operation))
    if kind == "Parameter":
        name = str(operation.get_friendly_name())
        size = min(_SIZES.get(element, math.inf), limits[name] - 1) if element in _WHOLE else math.inf
        return _Value(size, frozenset((name,)))
    if kind in POSITIONS_OF and element in _WHOLE:
        return _Value(_POSITIONS)
    sources = frozenset[str]().union(*(value.sources for value in inputs))
    return _Value(min(_result(operation, inputs), _SIZES.get(element, math.inf)), sources)


def _result(operation: openvino.Node, inputs: Sequence[_Value]) -> float:
    """Bound the result of an operation before it is stored in its type."""
    kind = operation.get_type_name()
    choosing = _CHOOSING.get(kind, ())
    carried = [value.size for index, value in enumerate(inputs) if index not in choosing]
    if kind in _RULES:
        return _RULES[kind](operation, [value.size for value in inputs])
    return max(carried or [value.size for value in inputs], default=math.inf) if kind in _CARRYING else math.inf


def _size_of_constant(operation: openvino.Node) -> float:
    """Return the largest magnitude of a constant; weights are not evaluated."""
    element, count = operation.get_output_element_type(0), math.prod(operation.get_output_shape(0))
    if not count or not (element in _WHOLE or (element in _FLOATS and count <= _LONGEST)):
        return math.inf
    data = operation.get_data()
    return max(abs(float(np.nanmin(data))), abs(float(np.nanmax(data))))


def _key(output: openvino.Output) -> tuple[str, int]:
    return output.get_node().get_name(), output.get_index()


def _times(left: float, right: float) -> float:
    return left * right if left and right else 0.0  # also of an infinity


def _length(shape: openvino.PartialShape, axis: int) -> int:
    return int(shape[axis].get_length()) if shape[axis].is_static else _LONGEST


def _summed(operation: openvino.Node, sizes: Sequence[float]) -> float:
    shape, axes = operation.get_input_partial_shape(0), operation.input_value(1).get_node()
    if shape.rank.is_dynamic or axes.get_type_name() != "Constant":
        return sizes[0] * _LONGEST
    return sizes[0] * min(math.prod(_length(shape, int(axis)) for axis in axes.get_data().ravel()), _LONGEST)


def _matrix_product(operation: openvino.Node, sizes: Sequence[float]) -> float:
    shape, transposed = operation.get_input_partial_shape(0), operation.get_attributes()["transpose_a"]
    flat = shape.rank.is_dynamic or len(shape) < 1 + transposed
    return _times(sizes[0], sizes[1]) * (_LONGEST if flat else _length(shape, -2 if transposed else -1))


def _bounded(operation: openvino.Node, sizes: Sequence[float]) -> float:
    """Bound a minimum or maximum; both in sequence, as a Clip is imported, are bounded by the two constants."""
    bounds = []
    for place in (0, 1):
        inner, bound = operation.input_value(place).get_node(), operation.input_value(1 - place).get_node()
        if {inner.get_type_name(), operation.get_type_name()} == {"Minimum", "Maximum"}:
            bounds = [bound, *(inner.input_value(index).get_node() for index in (0, 1))]
    constants = [_size_of_constant(each) for each in bounds if each.get_type_name() == "Constant"]
    return min(max(constants), max(sizes)) if len(constants) == 2 else max(sizes)


def _scattered(operation: openvino.Node, sizes: Sequence[float]) -> float:
    replaces = operation.get_attributes().get("reduction", "none") in {"none", "min", "max"}
    return max(sizes[0], sizes[2]) if replaces else math.inf


# Bound of an operation's output from the bounds of its inputs. Operations that are neither here nor in `_CARRYING` are
# unbounded: a graph in which their integers are visible is refused.
_RULES: dict[str, Callable[[openvino.Node, Sequence[float]], float]] = {
    **dict.fromkeys(("Add", "Subtract"), lambda _, s: s[0] + s[1]),
    "Multiply": lambda _, s: _times(s[0], s[1]),
    "Mod": lambda _, s: min(s),
    "FloorMod": lambda _, s: s[1],
    **dict.fromkeys(("Sign", "Sigmoid", "Softmax", "HardSigmoid"), lambda _, __: 1),
    "Clamp": lambda each, _: max(abs(float(each.get_attributes()[name])) for name in ("min", "max")),
    **dict.fromkeys(("Minimum", "Maximum"), _bounded),
    **dict.fromkeys(("ReduceSum", "ReduceMean", "CumSum"), _summed),
    **dict.fromkeys(("ScatterUpdate", "ScatterNDUpdate", "ScatterElementsUpdate"), _scattered),
    "MatMul": _matrix_product,
}


# Operations that return input integers unchanged; not Convert, which makes integers from floats.
_KEEPING = (_RETURNING | POSITIONS_OF | _BITS) - {"Convert", *_RULES}
