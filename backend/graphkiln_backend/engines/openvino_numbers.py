"""The table of operators whose results in OpenVINO (2026.4) differ from ONNX's specification, with an action for each.

OpenVINO computes operators that are not in the table as ONNX Runtime does. `scripts/conformance --sweep` verifies the
table with the installed releases: it feeds edge values to each operator of ONNX's node tests in each type.
docs/explanation/engines-differ.md describes the differences.

Integers of 32 and 64 bits have their own analysis, `openvino_integers`: the range within which OpenVINO is exact
depends on the whole graph.
"""

from __future__ import annotations

import enum
import functools
import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from mmap import ACCESS_READ, mmap
from pathlib import Path

import numpy as np
import openvino
from openvino import Type, opset11, opset13

from graphkiln_backend.engines import openvino_integers
from graphkiln_backend.engines.hardware import saturates_products_of_bytes
from graphkiln_backend.engines.openvino_integers import (
    IN_FLOATS,
    INTEGERS,
    LIMIT,
    MOVING,
    POSITIONS_OF,
    SUBGRAPHS,
    WIDE,
    find_limits,
    find_sizes,
)
from graphkiln_backend.graph.dtypes import AnyArray, DType
from graphkiln_backend.graph.errors import LoweringError, SignatureError

# A positive float32 plus this share of it is the next float32: the share is 0.75 to 1.5 units in the last place.
_NEXT = np.float32(1.5 * 2.0**-24)
_FILE = "checks.json"
_BEYOND_INT32 = (DType.INT64.numpy, DType.UINT64.numpy, DType.UINT32.numpy)
_UNSIGNED = {Type.boolean: 1, Type.u8: 8, Type.u16: 16, Type.u32: 32, Type.u64: 64}  # type -> bits
_SIGNED = {Type.i8: 8, Type.i16: 16, Type.i32: 32, Type.i64: 64}
_SHORT = frozenset((Type.i8, Type.u8, Type.i16, Type.u16))
_FLOATS = frozenset((Type.f32, Type.f16, Type.bf16, Type.f64))
_FLOATS_OF_8_BITS = frozenset((Type.f8e4m3, Type.f8e5m2, Type.f8e8m0))
_FEW_BITS = frozenset((Type.i4, Type.u4, Type.u2, Type.u3, Type.u6, Type.u1, Type.nf4, Type.f4e2m1))
_KEPT_SIGNED = frozenset((Type.i16, Type.u16, Type.u32, Type.u64))  # OpenVINO computes them in signed 32 bits
_LEVELS_OF_7_BITS = 128
# Operations whose results in 8 and 16 bits are values of their operands, or cannot leave the type.
_EXACT_IN_SHORT = MOVING | IN_FLOATS | {"Maximum", "Minimum", "Clamp", "ReduceMax", "ReduceMin"}
# Operations whose result is NaN wherever it depends on a NaN, including those that move values.
_CARRYING_NAN = (
    (MOVING - POSITIONS_OF - SUBGRAPHS - {"ScatterNDUpdate", "ScatterElementsUpdate"})
    | IN_FLOATS
    | {
        *("Add", "Subtract", "Multiply", "Divide", "Negative", "Abs", "Sqrt", "MatMul"),
        *("BatchNormInference", "ReduceSum", "ReduceMean", "ReduceProd", "AvgPool", "Equal", "NotEqual", "IsNaN"),
        *("IsInf", "IsFinite", "Sigmoid", "Tanh", "Erf", "LogicalNot", "LogicalAnd", "LogicalOr"),
    }
)
_DETECTING_NAN = frozenset(("IsNaN", "IsFinite", "Equal", "NotEqual"))


@dataclass(frozen=True, slots=True)
class Checks:
    """Checks of the values of a request.

    Attributes:
        limits: Input -> exclusive limit of the magnitude of its integers, if less than `LIMIT`.
        nan: Inputs that must not hold NaN.
    """

    limits: Mapping[str, int] = field(default_factory=dict)
    nan: frozenset[str] = frozenset()

    @classmethod
    def of(cls, model: openvino.Model, *, is_onnx: bool) -> Checks:
        """Find the checks that a model needs.

        Raises:
            LoweringError: Integers of its inputs would have to be too small to be useful.
        """
        return cls(find_limits(model), find_hidden_nan(model) if is_onnx else frozenset())

    @classmethod
    def read(cls, folder: Path) -> Checks:
        """Read the checks of a compiled model."""
        saved = json.loads((folder / _FILE).read_bytes())
        return cls({str(name): int(limit) for name, limit in saved["limits"].items()}, frozenset(saved["nan"]))

    def write(self, folder: Path) -> None:
        """Write the checks beside a compiled model."""
        document = {"limits": dict(self.limits), "nan": sorted(self.nan)}
        (folder / _FILE).write_text(json.dumps(document))

    def check(self, name: str, array: AnyArray) -> None:
        """Check an input.

        Raises:
            SignatureError: OpenVINO would change one of its values.
        """
        limit = self.limits.get(name, LIMIT)
        if name in self.nan:
            if has_nan(array):
                raise SignatureError(
                    f"input '{name}' holds NaN, which OpenVINO may turn into numbers",
                    expected="numbers",
                    got="NaN",
                    hint="replace it; engine: onnxruntime computes with it",
                )
        elif array.size and (array.dtype in _BEYOND_INT32 or (limit < LIMIT and array.dtype.kind in "iu")):
            lowest = -LIMIT if limit == LIMIT else 1 - limit
            least, most = int(array.min()), int(array.max())
            if least < lowest or most >= limit:
                raise SignatureError(
                    f"input '{name}' does not fit: OpenVINO computes integers in 32 bits, one of them for the sign",
                    expected=f"{lowest} to {limit - 1}",
                    got=f"{least} to {most}",
                )


NO_CHECKS = Checks()


def has_nan(array: AnyArray) -> bool:
    """Return true if an array of floats holds NaN."""
    if not array.size:
        return False
    if array.dtype.itemsize == 2:  # numpy's maximum of 16-bit floats is 300 times slower
        infinity = int(np.array(np.inf, array.dtype).view(np.uint16))
        return bool((np.ascontiguousarray(array).view(np.uint16) & 0x7FFF).max() > infinity)
    return math.isnan(array.max())


@functools.cache  # part of every key of the cache
def table_digest() -> str:
    """Return a digest of the source of the table and of the analysis of integers."""
    sources = (Path(__file__), Path(openvino_integers.__file__))
    return hashlib.sha256(b"".join(source.read_bytes() for source in sources)).hexdigest()[:16]


class Action(enum.StrEnum):
    """How a difference is handled."""

    REWRITTEN = "rewritten to be the same"
    REFUSED = "refused at load"
    CHECKED = "refused in a request"
    DOCUMENTED = "documented"


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """A difference.

    Attributes:
        onnx: Operators of ONNX, for readers and for `scripts/conformance --sweep`; empty for all.
        operations: Operations of OpenVINO that they become, to which the row applies; empty for all.
        types: Element types of their outputs; empty for all.
        when: Further condition on an operation and the largest magnitude of its result, or None.
        mark: Bytes that the ONNX file must contain, for differences that are not visible in OpenVINO's graph.
        values: Values for which results differ, if not for all.
        action: How the difference is handled.
        reason: What OpenVINO does, as the predicate of a sentence.
        rewrite: Correct an operation in place.
        always: Whether the row also applies to operations that do not depend on inputs of the graph.
        in_ir: Whether the row also applies to graphs in OpenVINO IR.
    """

    onnx: frozenset[str] = frozenset()
    operations: frozenset[str] = frozenset()
    types: frozenset[Type] = frozenset()
    when: Callable[[openvino.Node, float], bool] | None = None
    mark: bytes = b""
    values: str = ""
    action: Action
    reason: str
    rewrite: Callable[[openvino.Node], None] | None = None
    always: bool = False
    in_ir: bool = False

    def applies(self, operation: openvino.Node, size: float) -> bool:
        """Return true if this row applies to an operation."""
        return (
            (not self.operations or operation.get_type_name() in self.operations)
            and (not self.types or any(output.get_element_type() in self.types for output in operation.outputs()))
            and (self.when is None or self.when(operation, size))
        )


def _reads_wide_constant(operation: openvino.Node, _: float) -> bool:
    """Only constants in arithmetic count: the end of a slice may be arbitrarily large."""
    constants = [each.get_node() for each in operation.input_values() if each.get_element_type() in WIDE]
    data = [each.get_data() for each in constants if each.get_type_name() == "Constant"]
    return any(each.size and (int(each.min()) < -LIMIT or int(each.max()) >= LIMIT) for each in data)


def _leaves_short_type(operation: openvino.Node, size: float) -> bool:
    kind, element = operation.get_type_name(), operation.get_output_element_type(0)
    if kind in _EXACT_IN_SHORT:
        return False
    bits = _SIGNED[element] - 1 if element in _SIGNED else _UNSIGNED[element]
    return kind not in {"Add", "Multiply"} or size >= 2**bits


def _narrows_integer(operation: openvino.Node, size: float) -> bool:
    old, new = operation.get_input_element_type(0), operation.get_output_element_type(0)
    if new in _UNSIGNED:
        return old in _SIGNED or (old in _UNSIGNED and size >= 2 ** _UNSIGNED[new])
    return old in INTEGERS and size >= 2 ** (_SIGNED[new] - 1)


def _is_counted_by_value(operation: openvino.Node, _: float) -> bool:
    """Return false for constants, whose evaluation is correct, and for whole numbers up to a size."""
    start, stop, step = (each.get_node() for each in operation.input_values())
    if {each.get_type_name() for each in (start, stop, step)} == {"Constant"}:
        return False
    is_size = stop.get_type_name() == "Convert" and stop.get_input_element_type(0) in INTEGERS
    return not (_is_whole(start) and _is_whole(step) and is_size)


def _is_whole(node: openvino.Node) -> bool:
    return node.get_type_name() == "Constant" and bool(np.all(np.mod(node.get_data(), 1) == 0))


def _quantizes_to_8_bits(operation: openvino.Node, _: float) -> bool:
    return saturates_products_of_bytes() and operation.get_attributes()["levels"] > _LEVELS_OF_7_BITS


def _raise_limit(operation: openvino.Node) -> None:
    """Raise the limit of the overlap to the next float, so that "at least" means "more than" the original limit."""
    if len(operation.inputs()) <= 3:
        return
    limit = operation.input(3)
    source = limit.get_source_output()
    above = opset13.add(source, opset13.multiply(source, opset13.constant(_NEXT)))
    above = opset13.maximum(above, opset13.constant(np.finfo(np.float32).tiny))
    limit.replace_source_output(above.output(0))


def _order_equals(operation: openvino.Node) -> None:
    """Return equal values in the order of their indices, as ONNX specifies."""
    attributes = operation.get_attributes()
    ordered = opset11.topk(
        *operation.input_values(),
        axis=attributes["axis"],
        mode=attributes["mode"],
        sort="value",
        index_element_type=attributes["index_element_type"],
        stable=True,
    )
    ordered.set_friendly_name(operation.get_friendly_name())
    for old, new in zip(operation.outputs(), ordered.outputs(), strict=True):
        names = old.get_names()
        old.replace(new)
        new.set_names(names)


def _end_at_start(operation: openvino.Node) -> None:
    """Bound the end of a range of integers by its start, so that one in the other direction is empty."""
    start, stop, step = operation.input_values()
    upwards = opset13.greater(step, opset13.constant(0, step.get_element_type()))
    end = opset13.select(upwards, opset13.maximum(stop, start), opset13.minimum(stop, start))
    operation.input(1).replace_source_output(end.output(0))


def _of(*names: str) -> frozenset[str]:
    return frozenset(names)


TABLE: tuple[Row, ...] = (
    Row(
        onnx=_of("NonMaxSuppression"),
        operations=_of("NonMaxSuppression"),
        action=Action.REWRITTEN,
        reason="suppresses boxes whose overlap equals the limit; with a limit of 0 it keeps a single box",
        rewrite=_raise_limit,
        always=True,
    ),
    Row(
        onnx=_of("TopK", "ArgMax", "ArgMin", "Hardmax"),
        operations=_of("TopK"),
        when=lambda each, _: not each.get_attributes()["stable"],
        action=Action.REWRITTEN,
        reason="returns equal values in any order",
        rewrite=_order_equals,
        always=True,
    ),
    Row(
        onnx=_of("Range"),
        operations=_of("Range"),
        types=INTEGERS,
        action=Action.REWRITTEN,
        reason="counts upwards from a start beyond the end, where the range is empty",
        rewrite=_end_at_start,
    ),
    Row(
        onnx=_of("Range"),
        operations=_of("Range"),
        types=_FLOATS,
        when=_is_counted_by_value,
        action=Action.REFUSED,
        reason="makes ranges of floats one element shorter or longer",
        always=True,
    ),
    Row(
        operations=_of(
            *("Add", "Subtract", "Multiply", "Divide", "Mod", "FloorMod", "Power", "Gather", "Select"),
            *("BitwiseAnd", "BitwiseOr", "BitwiseXor"),
        ),
        when=_reads_wide_constant,
        action=Action.REFUSED,
        reason="computes integers in 32 bits, and the graph computes with a constant that takes more",
        always=True,
        in_ir=True,
    ),
    Row(
        types=_SHORT,
        when=_leaves_short_type,
        action=Action.REFUSED,
        reason="saturates or widens integers of 8 and 16 bits that overflow, and rounds their quotients",
    ),
    Row(
        onnx=_of("Cast", "CastLike"),
        operations=_of("Convert"),
        types=_KEPT_SIGNED,
        when=_narrows_integer,
        action=Action.REFUSED,
        reason="keeps 32 bits of integers that are cast to fewer or to unsigned ones",
    ),
    Row(
        onnx=_of("Cast", "CastLike"),
        operations=_of("Convert"),
        types=_FLOATS_OF_8_BITS,
        action=Action.REFUSED,
        reason="does not saturate casts to floats of 8 bits",
    ),
    Row(
        onnx=_of("Cast", "CastLike", "QuantizeLinear"),
        operations=_of("Convert"),
        types=_FEW_BITS,
        action=Action.REFUSED,
        reason="leaves out casts to integers of 4 and fewer bits",
    ),
    Row(
        onnx=_of("Pow"),
        operations=_of("Convert"),
        types=INTEGERS,
        when=lambda each, _: each.input_value(0).get_node().get_type_name() == "Power",
        action=Action.REFUSED,
        reason="raises integers to powers in FP32",
    ),
    Row(
        onnx=_of("BitShift"),
        operations=_of("Divide", "Multiply"),
        types=frozenset(_SIGNED),
        mark=b"\x08BitShift",
        action=Action.REFUSED,
        reason="shifts signed integers towards zero",
    ),
    Row(
        onnx=_of("Unique"),
        operations=_of("Unique"),
        when=lambda each, _: len(each.inputs()) > 1,
        action=Action.REFUSED,
        reason="orders unique slices along an axis otherwise",
    ),
    Row(
        onnx=_of("SpaceToDepth"),
        operations=_of("SpaceToDepth"),
        mark=b"CRD",
        action=Action.REFUSED,
        reason="leaves out the mode CRD of SpaceToDepth",
    ),
    Row(
        onnx=_of("GridSample"),
        operations=_of("GridSample"),
        types=INTEGERS | {Type.boolean},
        action=Action.REFUSED,
        reason="interpolates integers otherwise",
    ),
    Row(
        onnx=_of("QuantizeLinear", "DynamicQuantizeLinear", "QLinearMatMul", "QLinearConv"),
        operations=_of("FakeQuantize"),
        when=_quantizes_to_8_bits,
        action=Action.REFUSED,
        reason="lets products of int8 overflow on this CPU, which has no VNNI instructions",
        always=True,
        in_ir=True,
    ),
    Row(
        onnx=_of("Attention"),
        operations=_of("ScaledDotProductAttention", "Softmax"),
        mark=b"_window_size",  # suffix of the names of both attributes
        action=Action.REFUSED,
        reason="leaves out the window of Attention",
        always=True,
    ),
    Row(
        values="nan",
        action=Action.CHECKED,
        reason="hides NaN: maxima, ReLU, comparisons and others make numbers of it",
    ),
    Row(
        onnx=_of(
            *("Gelu", "LogSoftmax", "Softmax", "GridSample", "Mod", "ThresholdedRelu", "Conv", "LayerNormalization"),
            *("RMSNormalization", "GroupNormalization", "InstanceNormalization", "MeanVarianceNormalization"),
            *("RotaryEmbedding", "DFT", "Attention", "Shrink", "SoftmaxCrossEntropyLoss"),
        ),
        values="infinity",
        action=Action.DOCUMENTED,
        reason="computes NaN of infinities, or infinities where ONNX Runtime computes NaN",
    ),
    Row(
        values="overflow",
        action=Action.DOCUMENTED,
        reason="adds in another order, so that sums of numbers near the largest overflow elsewhere",
    ),
    Row(
        onnx=_of("QuantizeLinear"),
        values="ties",
        action=Action.DOCUMENTED,
        reason="rounds after it has added the zero point, so that halves become odd if that is odd",
    ),
    Row(
        onnx=_of("ReduceMax", "ReduceMin"),
        values="empty",
        action=Action.DOCUMENTED,
        reason="takes the largest FP32 for the extreme of nothing, not infinity",
    ),
    Row(
        onnx=_of("Cast", "CastLike"),
        types=frozenset((Type.f16,)),
        action=Action.DOCUMENTED,
        reason="keeps numbers of FP16 inside of a graph in FP32, so that large ones do not become infinite",
    ),
    Row(
        values="denormal",
        action=Action.DOCUMENTED,
        reason="replaces constants below 1.2e-38 by zero, and divides by such numbers as by zero",
    ),
    Row(
        onnx=_of("Cast", "CastLike"),
        values="out of range",
        action=Action.DOCUMENTED,
        reason="saturates floats beyond the range of an integer type; ONNX leaves the result undefined",
    ),
)


def apply_table(model: openvino.Model, onnx_file: Path | None, *, rewrites: bool = True) -> None:
    """Apply the rewrites and refusals of the table to a model, in place.

    Args:
        model: The model as read, before it is compiled.
        onnx_file: The file of the model, or None for OpenVINO IR, for which OpenVINO itself is the reference.
        rewrites: False to refuse what would be rewritten.

    Raises:
        LoweringError: The table refuses an operation.
    """
    rows = [row for row in TABLE if row.rewrite or row.action is Action.REFUSED]
    rows = [row for row in rows if (_has_mark(onnx_file, row.mark) if onnx_file else row.in_ir)]
    _apply(model, rows if rewrites else [replace(row, rewrite=None) for row in rows])


def _has_mark(path: Path, mark: bytes) -> bool:
    if not mark:
        return True
    with path.open("rb") as file, mmap(file.fileno(), 0, access=ACCESS_READ) as content:
        return content.find(mark) >= 0


def _apply(model: openvino.Model, rows: Sequence[Row]) -> None:
    operations = model.get_ordered_ops()
    sizes = find_sizes(operations)
    computed: set[str] = set()  # names of operations that depend on an input, and not only on its shape
    for operation in operations:
        kind, name = operation.get_type_name(), operation.get_name()
        sources = {each.get_node().get_name() for each in operation.input_values()}
        if kind == "Parameter" or (sources & computed and kind != "ShapeOf"):
            computed.add(name)
        for row in rows:
            if (name not in computed and not row.always) or not row.applies(operation, sizes[name]):
                continue
            if row.rewrite:
                row.rewrite(operation)
                continue
            element = operation.get_output_element_type(0).get_type_name()
            raise LoweringError(
                f"OpenVINO {row.reason}",
                attempts=(f"{kind} '{operation.get_friendly_name()}' of {element}",),
                hint="set engine: onnxruntime",
            )
        if kind == "If":
            _apply(operation.get_function(0), rows)
            _apply(operation.get_function(1), rows)
        elif kind in SUBGRAPHS:
            _apply(operation.get_function(), rows)


def find_hidden_nan(model: openvino.Model) -> frozenset[str]:
    """Find the inputs of floats whose NaN OpenVINO may turn into numbers.

    A Select whose condition comes from a test for NaN is assumed to replace the NaN that was tested.
    """
    hidden: frozenset[str] = frozenset()
    carried: dict[str, frozenset[str]] = {}  # operation -> inputs whose NaN it carries
    tested: dict[str, frozenset[str]] = {}  # operation -> inputs that it tests for NaN
    for operation in model.get_ordered_ops():
        kind, name = operation.get_type_name(), operation.get_name()
        sources = [each.get_node().get_name() for each in operation.input_values()]
        incoming = frozenset[str]().union(*(carried[each] for each in sources))
        found = frozenset[str]().union(*(tested[each] for each in sources))
        is_float = any(output.get_element_type() in _FLOATS for output in operation.outputs())
        if kind == "Parameter" and is_float:
            incoming = frozenset((str(operation.get_friendly_name()),))
        elif kind == "Select":
            incoming, found = incoming - found, frozenset()
        elif kind in _DETECTING_NAN:
            found |= incoming
        elif kind != "ShapeOf" and (kind not in _CARRYING_NAN or (kind == "Convert" and not is_float)):
            hidden |= incoming
        carried[name] = incoming if is_float else frozenset()
        tested[name] = found
    return hidden
