"""Building blocks of translators: a OneFlow operation, and the ONNX graph that receives its nodes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import onnx
import onnx_ir

from graphkiln_backend.graph.dtypes import AnyArray, DType
from graphkiln_backend.graph.errors import ConversionError
from graphkiln_backend.passes.graph_file import OPSET
from graphkiln_converters.oneflow.mlir import Operation, TensorType

# OneFlow's three notations for element types.
#
# Source: OneFlow 0.9.0, `oneflow/core/common/data_type.proto`; MLIR, "Builtin Dialect", types.

# In the order of the enumeration. The `meta` file of a state tensor contains the name.
_PROTO = (
    (1, "kChar", DType.INT8),
    (2, "kFloat", DType.FP32),
    (3, "kDouble", DType.FP64),
    (4, "kInt8", DType.INT8),
    (5, "kInt32", DType.INT32),
    (6, "kInt64", DType.INT64),
    (7, "kUInt8", DType.UINT8),
    (9, "kFloat16", DType.FP16),
    (11, "kBFloat16", DType.BF16),
    (12, "kBool", DType.BOOL),
    (13, "kUInt16", DType.UINT16),
    (14, "kUInt32", DType.UINT32),
    (15, "kUInt64", DType.UINT64),
    (17, "kInt16", DType.INT16),
)
_BY_PROTO_NUMBER = {number: dtype for number, _, dtype in _PROTO}
BY_PROTO_NAME = {name: dtype for _, name, dtype in _PROTO}
_BY_MLIR = {
    "f16": DType.FP16,
    "bf16": DType.BF16,
    "f32": DType.FP32,
    "f64": DType.FP64,
    "i1": DType.BOOL,
    **{f"{sign}{bits}": DType[f"INT{bits}"] for sign in ("i", "si") for bits in (8, 16, 32, 64)},
    **{f"ui{bits}": DType[f"UINT{bits}"] for bits in (8, 16, 32, 64)},
}


def dtype_from_mlir(element: str) -> DType:
    """Convert an MLIR element type, for example `f32`.

    Raises:
        ConversionError: The type is not supported.
    """
    if element not in _BY_MLIR:
        raise ConversionError(f"element type {element} is not supported", hint=f"supported: {', '.join(_BY_MLIR)}")
    return _BY_MLIR[element]


def dtype_from_number(number: int) -> DType:
    """Convert a value of OneFlow's enumeration `DataType`.

    Raises:
        ConversionError: The type is not supported.
    """
    if number not in _BY_PROTO_NUMBER:
        raise ConversionError(f"OneFlow's data type {number} is not supported")
    return _BY_PROTO_NUMBER[number]


Value = onnx_ir.Value
# IR version of the ONNX files; every runtime with support for the operator set reads it.
IR_VERSION = 10


@dataclass(kw_only=True, slots=True)
class GraphBuilder:
    """Nodes and weights of an ONNX graph under construction.

    Attributes:
        nodes: Nodes in topological order.
        weights: Name -> weight.
    """

    nodes: list[onnx_ir.Node] = field(default_factory=list)
    weights: dict[str, Value] = field(default_factory=dict)

    def weight(self, name: str, array: AnyArray) -> Value:
        """Add a weight, or return the existing one with the name."""
        if name not in self.weights:
            tensor = onnx_ir.tensor(array, name=name)
            self.weights[name] = Value(
                name=name, shape=onnx_ir.Shape(array.shape), type=onnx_ir.TensorType(tensor.dtype), const_value=tensor
            )
        return self.weights[name]


@dataclass(kw_only=True, slots=True)
class Op:
    """An operation to translate.

    Attributes:
        operation: The saved operation.
        inputs: Values of the operands, in order.
        graph: Graph to add nodes to.
    """

    operation: Operation
    inputs: Sequence[Value]
    graph: GraphBuilder
    _emitted: int = 0

    @property
    def name(self) -> str:
        """Name of the operation in OneFlow."""
        return str(self.operation.attributes.get("op_name") or self.operation.results[0])

    @property
    def x(self) -> Value:
        """The first input."""
        return self.inputs[0]

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the first input."""
        return self.shape_of(0)

    @property
    def rank(self) -> int:
        """Number of dimensions of the first input."""
        return len(self.shape)

    @property
    def dtype(self) -> DType:
        """Element type of the first input."""
        return dtype_from_mlir(self.operation.operand_types[0].element)

    @property
    def result_shape(self) -> tuple[int, ...]:
        """Shape of the first result."""
        return self._sizes(self.operation.result_types[0])

    @property
    def result_dtype(self) -> DType:
        """Element type of the first result."""
        return dtype_from_mlir(self.operation.result_types[0].element)

    def shape_of(self, index: int) -> tuple[int, ...]:
        """Shape of an input."""
        return self._sizes(self.operation.operand_types[index])

    def axis(self, name: str = "axis") -> int:
        """An attribute with an axis of the first input, as a non-negative number."""
        axis = self.integer(name)
        if not -self.rank <= axis < self.rank:
            raise self.error(f"'{name}' is {axis}, but the input has {self.rank} dimensions")
        return axis % self.rank

    def integer(self, name: str, default: int | None = None) -> int:
        """An integer attribute."""
        value: int = self._attribute(name, default, (int,))
        return value

    def number(self, name: str, default: float | None = None) -> float:
        """A numeric attribute."""
        return float(self._attribute(name, default, (int, float)))

    def flag(self, name: str, default: bool | None = None) -> bool:
        """A boolean attribute."""
        return bool(self._attribute(name, default, (bool,)))

    def text(self, name: str, default: str | None = None) -> str:
        """A string attribute."""
        return str(self._attribute(name, default, (str,)))

    def integers(self, name: str, default: Sequence[int] | None = None) -> list[int]:
        """An attribute that is a list of integers."""
        values: list[Any] = self._attribute(name, None if default is None else list(default), (list,))
        if not all(isinstance(value, int) for value in values):
            raise self.error(f"'{name}' is not a list of integers: {values}")
        return list(values)

    def scalar_operand(self) -> float | int:
        """The operand of a `scalar_*` operation: a float or an integer, according to its flags."""
        if self.flag("has_float_operand", False):
            return self.number("float_operand")
        if self.flag("has_bool_operand", False):
            return int(self.flag("bool_operand"))
        return self.integer("int_operand")

    def operand_segments(self) -> list[list[Value]]:
        """The inputs grouped by operand of the operation; the group of an optional operand may be empty."""
        sizes = self.integers("operand_segment_sizes", [1] * len(self.inputs))
        if any(size < 0 for size in sizes) or sum(sizes) != len(self.inputs):
            raise self.error(f"operand_segment_sizes {sizes} do not fit {len(self.inputs)} operands")
        remaining = iter(self.inputs)
        return [[next(remaining) for _ in range(size)] for size in sizes]

    def emit(self, op_type: str, *inputs: Value | None, **attributes: Any) -> Value:
        """Add a node with one output."""
        return self.emit_multiple(op_type, 1, *inputs, **attributes)[0]

    def emit_multiple(self, op_type: str, count: int, *inputs: Value | None, **attributes: Any) -> Sequence[Value]:
        """Add a node with a number of outputs."""
        name = self.name if not self._emitted else f"{self.name}/{self._emitted}"
        self._emitted += 1
        node = onnx_ir.node(op_type, inputs, attributes, num_outputs=count, name=name)
        for number, value in enumerate(node.outputs):
            value.name = name if not number else f"{name}:{number}"
        self._infer(node)
        self.graph.nodes.append(node)
        return node.outputs

    def _infer(self, node: onnx_ir.Node) -> None:
        """Set the types and shapes of a node's outputs by ONNX's inference."""
        inputs = [value for value in node.inputs if value is not None]
        shapes = {
            str(value.name): onnx_ir.serde.serialize_tensor(value.const_value)
            for value in inputs
            if value.const_value is not None and value.const_value.size <= _MAX_SHAPE_ELEMENTS
        }
        try:
            inferred = onnx.shape_inference.infer_node_outputs(
                onnx.defs.get_schema(node.op_type, OPSET),
                onnx_ir.serde.serialize_node(node),
                {str(value.name): _type_proto(value) for value in inputs},
                shapes,
                opset_imports=[onnx.helper.make_opsetid("", OPSET)],
                ir_version=IR_VERSION,
            )
        except _INFERENCE_ERRORS as error:
            reason = str(error).splitlines()[0]
            raise self.error(f"operands and attributes do not fit each other: {node.op_type}: {reason}") from error
        for value in node.outputs:
            type_ = inferred[str(value.name)].tensor_type
            value.type = onnx_ir.TensorType(onnx_ir.DataType(type_.elem_type))
            value.shape = onnx_ir.Shape(dim.dim_value for dim in type_.shape.dim) if type_.HasField("shape") else None

    def constant(self, value: npt.ArrayLike, dtype: DType = DType.INT64) -> Value:
        """Add a constant; INT64 by default, the type of shapes and axes in ONNX."""
        array = np.asarray(value, dtype.numpy)
        if array.size <= _MAX_SHARED_ELEMENTS:
            return self.graph.weight(f"constant/{dtype}{list(array.shape)}/{array.tobytes().hex()}", array)
        name = f"{self.name}/of"
        while name in self.graph.weights:
            name += "_"
        return self.graph.weight(name, array)

    def scalar(self, value: float) -> Value:
        """Add a scalar constant of the first input's element type."""
        return self.constant(value, self.dtype)

    def cast(self, value: Value, dtype: DType) -> Value:
        """Convert a value to another element type."""
        return self.emit("Cast", value, to=_ONNX_DTYPES[str(dtype)])

    def error(self, message: str) -> ConversionError:
        """Create an error with the line and name of this operation."""
        return ConversionError(f"line {self.operation.line}: {self.operation.kind} '{self.name}': {message}")

    def _attribute(self, name: str, default: Any, types: tuple[type, ...]) -> Any:
        value = self.operation.attributes.get(name, default)
        if value is None:
            raise self.error(f"attribute '{name}' is missing")
        if not isinstance(value, types) or (isinstance(value, bool) and bool not in types):
            raise self.error(
                f"attribute '{name}' is {value!r}, expected {' or '.join(type_.__name__ for type_ in types)}"
            )
        return value

    def _sizes(self, type_: TensorType) -> tuple[int, ...]:
        if None in type_.shape:
            raise self.error(f"{type_} has a dynamic size")
        return tuple(dim for dim in type_.shape if dim is not None)


def _type_proto(value: Value) -> onnx.TypeProto:
    shape = None if value.shape is None else [int(dim) for dim in value.shape.numpy()]
    return onnx.helper.make_tensor_type_proto(int(value.dtype or onnx_ir.DataType.UNDEFINED), shape)


# Raised for invalid attributes and inputs of a node; the last one for numbers above 64 bits.
_INFERENCE_ERRORS = (onnx.shape_inference.InferenceError, onnx.checker.ValidationError, onnx_ir.serde.SerdeError)
# Largest constant that is shared by all nodes with the same constant.
_MAX_SHARED_ELEMENTS = 8
# Largest constant that may be a shape or axes, whose elements shape inference needs.
_MAX_SHAPE_ELEMENTS = 64
_ONNX_DTYPES = {str(dtype): onnx_ir.DataType.from_numpy(dtype.numpy) for dtype in DType if dtype is not DType.BYTES}


# Layout of feature maps and of per-channel parameters.


def check_channels_first(op: Op) -> None:
    """Reject the channels-last layout, which ONNX does not support.

    Raises:
        ConversionError: The operation uses channels last.
    """
    if op.text("data_format", "channels_first") != "channels_first":
        raise op.error("data_format 'channels_last' cannot be translated: save the graph without ONEFLOW_ENABLE_NHWC")


def align_to_axis(op: Op, values: Value, axis: int) -> Value:
    """Reshape values `[size]` to broadcast along an axis of the first input."""
    shape = [-1] + [1] * (op.rank - 1 - axis)
    if len(shape) == 1:
        return values
    if values.const_value is not None:
        return op.graph.weight(f"{values.name}{shape[1:]}", values.const_value.numpy().reshape(shape))
    return op.emit("Reshape", values, op.constant(shape))


# Registry of translators: functions of `operators/`.

# Add an operation's nodes to the graph and return its results; unused results may be missing.
Translator = Callable[[Op], Value | Sequence[Value]]

# Operation -> translator, from the imported modules of `operators/`.
TRANSLATORS: dict[str, Translator] = {}


_T = TypeVar("_T", bound=Translator)


def translates(*kinds: str) -> Callable[[_T], _T]:
    """Register a function as the translator of these operations."""

    def register(function: _T) -> _T:
        TRANSLATORS.update(dict.fromkeys(kinds, function))
        return function

    return register
