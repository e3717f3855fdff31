"""Two values, or a value and a number: arithmetic, comparisons, choices."""

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
    """The operation that ONNX has, too; shapes broadcast alike."""
    return op.emit(_BINARY[op.operation.kind], *op.inputs)


@translates(*_SCALAR)
def with_scalar(op: Op) -> Value:
    """The same with a number of the tensor's type."""
    return op.emit(_SCALAR[op.operation.kind], op.x, op.scalar(op.scalar_operand()))


@translates("scalar_reverse_pow")
def reverse_pow(op: Op) -> Value:
    """A number to the power of each element."""
    return op.emit("Pow", op.scalar(op.scalar_operand()), op.x)


@translates("broadcast_fmod", "scalar_fmod")
def fmod(op: Op) -> Value:
    """The remainder with the sign of the dividend."""
    return op.emit("Mod", op.x, _other(op), fmod=1)


@translates("floordiv", "scalar_floordiv")
def floor_div(op: Op) -> Value:
    """The quotient, down to the whole number."""
    if not op.dtype.is_float:
        raise op.error("whole numbers are rounded another way by ONNX where one is negative")
    return op.emit("Floor", op.emit("Div", op.x, _other(op)))


@translates("atan2")
def atan2(op: Op) -> Value:
    """The angle of a point: the arc tangent, half a turn on where x is below 0; 0 for the origin."""
    y, x = op.inputs
    zero = op.scalar(0.0)
    turn = op.emit("Where", op.emit("Less", y, zero), op.scalar(-math.pi), op.scalar(math.pi))
    turned = op.emit("Where", op.emit("Less", x, zero), turn, zero)
    angle = op.emit("Add", op.emit("Atan", op.emit("Div", y, x)), turned)
    origin = op.emit("And", op.emit("Equal", x, zero), op.emit("Equal", y, zero))
    return op.emit("Where", origin, zero, angle)


@translates(*(f"broadcast_{name}" for name in _COMPARISONS))
def comparison(op: Op) -> Value:
    """True or false for each element."""
    return op.emit(_COMPARISONS[op.operation.kind.removeprefix("broadcast_")], *op.inputs)


@translates(*(f"scalar_logical_{name}" for name in _COMPARISONS))
def comparison_with_scalar(op: Op) -> Value:
    """The same with a number."""
    return op.emit(
        _COMPARISONS[op.operation.kind.removeprefix("scalar_logical_")], op.x, op.scalar(op.scalar_operand())
    )


@translates("broadcast_not_equal")
def not_equal(op: Op) -> Value:
    """True where both differ."""
    return op.emit("Not", op.emit("Equal", *op.inputs))


@translates("scalar_logical_not_equal")
def not_equal_to_scalar(op: Op) -> Value:
    """True where it is not that number."""
    return op.emit("Not", op.emit("Equal", op.x, op.scalar(op.scalar_operand())))


@translates(*(f"broadcast_{name}" for name in _LOGIC))
def logic(op: Op) -> Value:
    """Of true and false; other numbers count as true unless they are 0."""
    kind = _LOGIC[op.operation.kind.removeprefix("broadcast_")]
    return op.emit(kind, *(op.cast(value, DType.BOOL) for value in op.inputs))


@translates("logical_not")
def logical_not(op: Op) -> Value:
    """True for 0."""
    return op.emit("Not", op.cast(op.x, DType.BOOL))


@translates("where")
def where(op: Op) -> Value:
    """Of two values, element by element."""
    condition, x, y = op.inputs
    return op.emit("Where", op.cast(condition, DType.BOOL), x, y)


@translates("where_scalar_x", "where_scalar_y", "where_scalar_xy")
def where_scalar(op: Op) -> Value:
    """Of a value and a number, or of two numbers."""
    kind = op.operation.kind
    condition = op.cast(op.x, DType.BOOL)
    dtype = op.result_dtype
    if kind.endswith("_xy"):
        names = ("x_float_operand", "y_float_operand") if op.flag("has_x_float_operand", False) else ()
        if not names:
            names = ("x_int_operand", "y_int_operand")
        x, y = (op.constant(op.number(name), dtype) for name in names)
        return op.emit("Where", condition, x, y)
    number = op.constant(op.scalar_operand(), dtype)
    x, y = (number, op.inputs[1]) if kind.endswith("_x") else (op.inputs[1], number)
    return op.emit("Where", condition, x, y)


@translates("masked_fill")
def masked_fill(op: Op) -> Value:
    """A number where the mask is true."""
    x, mask = op.inputs
    return op.emit("Where", op.cast(mask, DType.BOOL), op.scalar(op.scalar_operand()), x)


@translates("cast")
def cast(op: Op) -> Value:
    """As another type."""
    return op.cast(op.x, op.result_dtype)


def _other(op: Op) -> Value:
    return op.inputs[1] if len(op.inputs) > 1 else op.scalar(op.scalar_operand())
