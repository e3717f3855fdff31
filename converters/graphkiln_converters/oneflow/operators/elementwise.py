"""Elementwise functions, arithmetic, comparisons, logic and selection, and softmax."""

from __future__ import annotations

import math

from graphkiln_backend.graph.dtypes import DType
from graphkiln_converters.oneflow.building import TRANSLATORS, Op, Value, align_to_axis, translates

# Operations without attributes that are the same in ONNX.
_UNARY = {
    "relu": "Relu",
    "sigmoid": "Sigmoid",
    "tanh": "Tanh",
    "exp": "Exp",
    "log": "Log",
    "abs": "Abs",
    "sqrt": "Sqrt",
    "floor": "Floor",
    "ceil": "Ceil",
    "round": "Round",
    "sign": "Sign",
    "negative": "Neg",
    "erf": "Erf",
    "reciprocal": "Reciprocal",
    "sin": "Sin",
    "cos": "Cos",
    "tan": "Tan",
    "asin": "Asin",
    "acos": "Acos",
    "atan": "Atan",
    "sinh": "Sinh",
    "cosh": "Cosh",
    "asinh": "Asinh",
    "acosh": "Acosh",
    "atanh": "Atanh",
    "softsign": "Softsign",
    "hardswish": "HardSwish",
    "isnan": "IsNaN",
    "isinf": "IsInf",
    "identity": "Identity",
}


@translates(*_UNARY)
def unary(op: Op) -> Value:
    """Translate to the same operation of ONNX."""
    return op.emit(_UNARY[op.operation.kind], op.x)


# Operations that are one expression in ONNX.
TRANSLATORS |= {
    "rsqrt": lambda op: op.emit("Reciprocal", op.emit("Sqrt", op.x)),
    "square": lambda op: op.emit("Mul", op.x, op.x),
    "log1p": lambda op: op.emit("Log", op.emit("Add", op.x, op.scalar(1.0))),
    "expm1": lambda op: op.emit("Sub", op.emit("Exp", op.x), op.scalar(1.0)),
    "gelu": lambda op: _gelu(op, op.x),
    "quick_gelu": lambda op: op.emit("Mul", op.x, op.emit("Sigmoid", op.emit("Mul", op.x, op.scalar(1.702)))),
    "silu": lambda op: op.emit("Mul", op.x, op.emit("Sigmoid", op.x)),
    "mish": lambda op: op.emit("Mul", op.x, op.emit("Tanh", op.emit("Softplus", op.x))),
    "log_sigmoid": lambda op: op.emit("Neg", op.emit("Softplus", op.emit("Neg", op.x))),
    "hardsigmoid": lambda op: op.emit("HardSigmoid", op.x, alpha=1 / 6, beta=0.5),
    "hardtanh": lambda op: op.emit("Clip", op.x, op.scalar(op.number("min_val")), op.scalar(op.number("max_val"))),
    "hardshrink": lambda op: op.emit("Shrink", op.x, lambd=op.number("lambd"), bias=0.0),
    "softshrink": lambda op: op.emit("Shrink", op.x, lambd=op.number("alpha"), bias=op.number("alpha")),
    "threshold": lambda op: op.emit(
        "Where",
        op.emit("Greater", op.x, op.scalar(op.number("threshold_val"))),
        op.x,
        op.scalar(op.number("value")),
    ),
    "leaky_relu": lambda op: op.emit("LeakyRelu", op.x, alpha=op.number("alpha")),
    "elu": lambda op: op.emit("Elu", op.x, alpha=op.number("alpha")),
    "celu": lambda op: op.emit("Celu", op.x, alpha=op.number("alpha")),
    "selu": lambda op: op.emit("Selu", op.x),
    "prelu": lambda op: op.emit("PRelu", op.x, align_to_axis(op, op.inputs[1], 1)),  # a slope for each channel
    "softmax": lambda op: op.emit("Softmax", op.x, axis=-1),
    "log_softmax": lambda op: op.emit("LogSoftmax", op.x, axis=-1),
}


@translates("fused_bias_add_gelu")
def gelu_of_sum(op: Op) -> Value:
    """Apply GELU to the sum with a bias along an axis; used on GPUs."""
    return _gelu(op, op.emit("Add", op.x, align_to_axis(op, op.inputs[1], op.axis())))


def _gelu(op: Op, x: Value) -> Value:
    erf = op.emit("Erf", op.emit("Div", x, op.scalar(math.sqrt(2.0))))
    return op.emit("Mul", op.emit("Mul", x, op.emit("Add", erf, op.scalar(1.0))), op.scalar(0.5))


@translates("fast_gelu")
def fast_gelu(op: Op) -> Value:
    """Compute `x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 * x^3)))`."""
    cube = op.emit("Mul", op.emit("Mul", op.x, op.x), op.x)
    inner = op.emit("Add", op.x, op.emit("Mul", cube, op.scalar(0.044715)))
    tanh = op.emit("Tanh", op.emit("Mul", inner, op.scalar(math.sqrt(2.0 / math.pi))))
    return op.emit("Mul", op.emit("Mul", op.x, op.emit("Add", tanh, op.scalar(1.0))), op.scalar(0.5))


@translates("clip_by_scalar", "clip_by_scalar_min", "clip_by_scalar_max")
def clip(op: Op) -> Value:
    """Clip to a minimum, a maximum, or both."""
    prefix = "floating" if op.dtype.is_float else "integral"
    bounds = [
        None if op.operation.kind.endswith(other) else op.scalar(op.number(f"{prefix}_{end}"))
        for end, other in (("min", "_max"), ("max", "_min"))
    ]
    return op.emit("Clip", op.x, *bounds)


# Operations of two tensors, or of a tensor and a scalar: arithmetic, comparisons, logic, selection.

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
    """Translate to the same operation of ONNX, with the same broadcasting."""
    return op.emit(_BINARY[op.operation.kind], *op.inputs)


@translates(*_SCALAR)
def with_scalar(op: Op) -> Value:
    """Combine a tensor with a scalar of its element type."""
    return op.emit(_SCALAR[op.operation.kind], op.x, op.scalar(op.scalar_operand()))


TRANSLATORS |= {
    "scalar_reverse_pow": lambda op: op.emit("Pow", op.scalar(op.scalar_operand()), op.x),
    "broadcast_not_equal": lambda op: op.emit("Not", op.emit("Equal", *op.inputs)),
    "scalar_logical_not_equal": lambda op: op.emit("Not", op.emit("Equal", op.x, op.scalar(op.scalar_operand()))),
    "logical_not": lambda op: op.emit("Not", op.cast(op.x, DType.BOOL)),
    "cast": lambda op: op.cast(op.x, op.result_dtype),
}


@translates("broadcast_fmod", "scalar_fmod")
def fmod(op: Op) -> Value:
    """Compute the remainder with the sign of the dividend."""
    return op.emit("Mod", op.x, _second_operand(op), fmod=1)


@translates("floordiv", "scalar_floordiv")
def floor_div(op: Op) -> Value:
    """Compute the quotient, rounded down."""
    if not op.dtype.is_float:
        raise op.error("ONNX rounds a negative quotient of integers towards zero")
    return op.emit("Floor", op.emit("Div", op.x, _second_operand(op)))


@translates("atan2")
def atan2(op: Op) -> Value:
    """Compute the angle of a point: the arc tangent, plus or minus pi if x is negative; 0 for the origin."""
    y, x = op.inputs
    zero = op.scalar(0.0)
    half_turn = op.emit("Where", op.emit("Less", y, zero), op.scalar(-math.pi), op.scalar(math.pi))
    offset = op.emit("Where", op.emit("Less", x, zero), half_turn, zero)
    angle = op.emit("Add", op.emit("Atan", op.emit("Div", y, x)), offset)
    origin = op.emit("And", op.emit("Equal", x, zero), op.emit("Equal", y, zero))
    return op.emit("Where", origin, zero, angle)


@translates(*(f"broadcast_{name}" for name in _COMPARISONS))
def comparison(op: Op) -> Value:
    """Compare two tensors."""
    return op.emit(_COMPARISONS[op.operation.kind.removeprefix("broadcast_")], *op.inputs)


@translates(*(f"scalar_logical_{name}" for name in _COMPARISONS))
def comparison_with_scalar(op: Op) -> Value:
    """Compare a tensor with a scalar."""
    return op.emit(
        _COMPARISONS[op.operation.kind.removeprefix("scalar_logical_")], op.x, op.scalar(op.scalar_operand())
    )


@translates(*(f"broadcast_{name}" for name in _LOGIC))
def logic(op: Op) -> Value:
    """Combine booleans; numbers other than 0 are true."""
    kind = _LOGIC[op.operation.kind.removeprefix("broadcast_")]
    return op.emit(kind, *(op.cast(value, DType.BOOL) for value in op.inputs))


@translates("where")
def where(op: Op) -> Value:
    """Select elements of one of two tensors by a condition."""
    condition, x, y = op.inputs
    return op.emit("Where", op.cast(condition, DType.BOOL), x, y)


@translates("where_scalar_x", "where_scalar_y", "where_scalar_xy")
def where_scalar(op: Op) -> Value:
    """Select elements of a tensor or a scalar, or one of two scalars, by a condition."""
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
    """Replace elements by a scalar where the mask is true."""
    x, mask = op.inputs
    return op.emit("Where", op.cast(mask, DType.BOOL), op.scalar(op.scalar_operand()), x)


def _second_operand(op: Op) -> Value:
    return op.inputs[1] if len(op.inputs) > 1 else op.scalar(op.scalar_operand())
