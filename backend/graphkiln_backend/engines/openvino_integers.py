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
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import openvino

from graphkiln_backend.engines.openvino_intervals import (
    ANYTHING,
    CARRYING,
    LIMIT,
    LONGEST,
    MOVING,
    RULES,
    Interval,
    hull,
)
from graphkiln_backend.graph.errors import LoweringError

_FILE = "limits.json"
_EXACT = 1 << 24
"""FP32 holds all integers up to this."""
_LEAST_LIMIT = 1 << 20
"""A graph whose input may hold no more is refused: vocabularies and tables are smaller, prices and times are not."""
_LEAST_OF_MASK = 2
"""An input that is called a mask holds 0 and 1: sums of it, and DeBERTa's product of it with itself, are small."""
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
"""Operations, and which of their inputs choose or say how much, by index."""
_POSITIONS_OF = frozenset(
    ("MaxPool", "ShapeOf", "TopK", "NonZero", "NonMaxSuppression", "Unique", "Bucketize", "SearchSorted")
)
_NESTED = frozenset(("If", "Loop", "TensorIterator"))
"""Operations whose graphs are not looked into."""
_COMPUTING = _NESTED | {"Convert"}
"""Operations that return other integers than they are given, beside those with a rule: a float becomes one."""


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
