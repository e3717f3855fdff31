"""Operations of two tensors, or of a tensor and a scalar: arithmetic, comparisons, logic, selection."""

from __future__ import annotations

import math

from graphkiln_backend.graph.dtypes import DType
from graphkiln_converters.oneflow.building import Op, Value
from graphkiln_converters.oneflow.translator import translates

_BINARY = {
    "broadcast_add": "Add",
    "broadcast_sub": "Sub",
    "broadcast_mul": "Mul",
    "broadcast_div": "Div",
    "broadcast_pow": "Pow",
    "pow": "Pow",
    "broadcast_maximum": "Max",
    "broadcast_minimum": "Min",
    "elementwise_maximum": "Max",
    "elementwise_minimum": "Min",
    "add_n": "Sum",
    "add_n2": "Add",
}
_COMPARISONS = {
    "equal": "Equal",
    "greater": "Greater",
    "greater_equal": "GreaterOrEqual",
    "less": "Less",
    "less_equal": "LessOrEqual",
}
_LOGIC = {"logical_and": "And", "logical_or": "Or", "logical_xor": "Xor"}
_SCALAR = {"scalar_add": "Add", "scalar_mul": "Mul", "scalar_div": "Div", "scalar_pow": "Pow"}


@translates(*_BINARY)
def binary(op: Op) -> Value:
    """The same operation of ONNX; shapes broadcast alike."""
    return op.emit(_BINARY[op.operation.kind], *op.inputs)


@translates(*_SCALAR)
def with_scalar(op: Op) -> Value:
    """With a scalar of the tensor's element type."""
    return op.emit(_SCALAR[op.operation.kind], op.x, op.scalar(op.scalar_operand()))


@translates("scalar_reverse_pow")
def reverse_pow(op: Op) -> Value:
    """A scalar to the power of each element."""
    return op.emit("Pow", op.scalar(op.scalar_operand()), op.x)


@translates("broadcast_fmod", "scalar_fmod")
def fmod(op: Op) -> Value:
    """The remainder with the sign of the dividend."""
    return op.emit("Mod", op.x, _second_operand(op), fmod=1)


@translates("floordiv", "scalar_floordiv")
def floor_div(op: Op) -> Value:
    """The quotient, rounded down."""
    if not op.dtype.is_float:
        raise op.error("ONNX rounds a negative quotient of integers towards zero")
    return op.emit("Floor", op.emit("Div", op.x, _second_operand(op)))


@translates("atan2")
def atan2(op: Op) -> Value:
    """The angle of a point: the arc tangent, plus or minus pi where x is negative; 0 for the origin."""
    y, x = op.inputs
    zero = op.scalar(0.0)
    half_turn = op.emit("Where", op.emit("Less", y, zero), op.scalar(-math.pi), op.scalar(math.pi))
    offset = op.emit("Where", op.emit("Less", x, zero), half_turn, zero)
    angle = op.emit("Add", op.emit("Atan", op.emit("Div", y, x)), offset)
    origin = op.emit("And", op.emit("Equal", x, zero), op.emit("Equal", y, zero))
    return op.emit("Where", origin, zero, angle)


@translates(*(f"broadcast_{name}" for name in _COMPARISONS))
def comparison(op: Op) -> Value:
    """True where the comparison holds."""
    return op.emit(_COMPARISONS[op.operation.kind.removeprefix("broadcast_")], *op.inputs)


@translates(*(f"scalar_logical_{name}" for name in _COMPARISONS))
def comparison_with_scalar(op: Op) -> Value:
    """True where the comparison with a scalar holds."""
    return op.emit(
        _COMPARISONS[op.operation.kind.removeprefix("scalar_logical_")], op.x, op.scalar(op.scalar_operand())
    )


@translates("broadcast_not_equal")
def not_equal(op: Op) -> Value:
    """True where two elements differ."""
    return op.emit("Not", op.emit("Equal", *op.inputs))


@translates("scalar_logical_not_equal")
def not_equal_to_scalar(op: Op) -> Value:
    """True where an element differs from a scalar."""
    return op.emit("Not", op.emit("Equal", op.x, op.scalar(op.scalar_operand())))


@translates(*(f"broadcast_{name}" for name in _LOGIC))
def logic(op: Op) -> Value:
    """Of booleans; numbers count as true unless they are 0."""
    kind = _LOGIC[op.operation.kind.removeprefix("broadcast_")]
    return op.emit(kind, *(op.cast(value, DType.BOOL) for value in op.inputs))


@translates("logical_not")
def logical_not(op: Op) -> Value:
    """True for 0."""
    return op.emit("Not", op.cast(op.x, DType.BOOL))


@translates("where")
def where(op: Op) -> Value:
    """Elements of one of two tensors, as a condition says."""
    condition, x, y = op.inputs
    return op.emit("Where", op.cast(condition, DType.BOOL), x, y)


@translates("where_scalar_x", "where_scalar_y", "where_scalar_xy")
def where_scalar(op: Op) -> Value:
    """Elements of a tensor or a scalar, or of one of two scalars, as a condition says."""
    kind = op.operation.kind
    condition = op.cast(op.x, DType.BOOL)
    dtype = op.result_dtype
    if kind.endswith("_xy"):
        type_ = "float" if op.flag("has_x_float_operand", False) else "int"
        x, y = (op.constant(op.number(f"{name}_{type_}_operand"), dtype) for name in ("x", "y"))
        return op.emit("Where", condition, x, y)
    scalar = op.constant(op.scalar_operand(), dtype)
    x, y = (scalar, op.inputs[1]) if kind.endswith("_x") else (op.inputs[1], scalar)
    return op.emit("Where", condition, x, y)


@translates("masked_fill")
def masked_fill(op: Op) -> Value:
    """A scalar where the mask is true, the tensor elsewhere."""
    x, mask = op.inputs
    return op.emit("Where", op.cast(mask, DType.BOOL), op.scalar(op.scalar_operand()), x)


@translates("cast")
def cast(op: Op) -> Value:
    """Another element type."""
    return op.cast(op.x, op.result_dtype)


def _second_operand(op: Op) -> Value:
    return op.inputs[1] if len(op.inputs) > 1 else op.scalar(op.scalar_operand())
