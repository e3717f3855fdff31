"""Elementwise functions of one tensor, and softmax."""

from __future__ import annotations

import math

from graphkiln_converters.oneflow.building import Op, Value
from graphkiln_converters.oneflow.layout import align_to_axis
from graphkiln_converters.oneflow.translator import translates

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
"""Operations that ONNX has, too, without attributes."""


@translates(*_UNARY)
def unary(op: Op) -> Value:
    """The same operation of ONNX."""
    return op.emit(_UNARY[op.operation.kind], op.x)


@translates("rsqrt")
def rsqrt(op: Op) -> Value:
    """`1 / sqrt(x)`."""
    return op.emit("Reciprocal", op.emit("Sqrt", op.x))


@translates("square")
def square(op: Op) -> Value:
    """`x * x`."""
    return op.emit("Mul", op.x, op.x)


@translates("log1p")
def log1p(op: Op) -> Value:
    """`log(1 + x)`."""
    return op.emit("Log", op.emit("Add", op.x, op.scalar(1.0)))


@translates("expm1")
def expm1(op: Op) -> Value:
    """`exp(x) - 1`."""
    return op.emit("Sub", op.emit("Exp", op.x), op.scalar(1.0))


@translates("gelu")
def gelu(op: Op) -> Value:
    """`x / 2 * (1 + erf(x / sqrt(2)))`."""
    return _gelu(op, op.x)


@translates("fused_bias_add_gelu")
def gelu_of_sum(op: Op) -> Value:
    """GELU of the sum with a bias along an axis; used on GPUs."""
    return _gelu(op, op.emit("Add", op.x, align_to_axis(op, op.inputs[1], op.axis())))


def _gelu(op: Op, x: Value) -> Value:
    erf = op.emit("Erf", op.emit("Div", x, op.scalar(math.sqrt(2.0))))
    return op.emit("Mul", op.emit("Mul", x, op.emit("Add", erf, op.scalar(1.0))), op.scalar(0.5))


@translates("fast_gelu")
def fast_gelu(op: Op) -> Value:
    """`x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 * x^3)))`."""
    cube = op.emit("Mul", op.emit("Mul", op.x, op.x), op.x)
    inner = op.emit("Add", op.x, op.emit("Mul", cube, op.scalar(0.044715)))
    tanh = op.emit("Tanh", op.emit("Mul", inner, op.scalar(math.sqrt(2.0 / math.pi))))
    return op.emit("Mul", op.emit("Mul", op.x, op.emit("Add", tanh, op.scalar(1.0))), op.scalar(0.5))


@translates("quick_gelu")
def quick_gelu(op: Op) -> Value:
    """`x * sigmoid(1.702 * x)`."""
    return op.emit("Mul", op.x, op.emit("Sigmoid", op.emit("Mul", op.x, op.scalar(1.702))))


@translates("silu")
def silu(op: Op) -> Value:
    """`x * sigmoid(x)`."""
    return op.emit("Mul", op.x, op.emit("Sigmoid", op.x))


@translates("mish")
def mish(op: Op) -> Value:
    """`x * tanh(log(1 + exp(x)))`."""
    return op.emit("Mul", op.x, op.emit("Tanh", op.emit("Softplus", op.x)))


@translates("log_sigmoid")
def log_sigmoid(op: Op) -> Value:
    """`-log(1 + exp(-x))`."""
    return op.emit("Neg", op.emit("Softplus", op.emit("Neg", op.x)))


@translates("hardsigmoid")
def hardsigmoid(op: Op) -> Value:
    """`min(max(x / 6 + 1 / 2, 0), 1)`."""
    return op.emit("HardSigmoid", op.x, alpha=1 / 6, beta=0.5)


@translates("hardtanh")
def hardtanh(op: Op) -> Value:
    """Clipped to `[min_val, max_val]`; ReLU6 is one of them."""
    return op.emit("Clip", op.x, op.scalar(op.number("min_val")), op.scalar(op.number("max_val")))


@translates("hardshrink")
def hardshrink(op: Op) -> Value:
    """0 where the absolute value is at most `lambd`."""
    return op.emit("Shrink", op.x, lambd=op.number("lambd"), bias=0.0)


@translates("softshrink")
def softshrink(op: Op) -> Value:
    """0 where the absolute value is at most `alpha`, shrunk by `alpha` elsewhere."""
    return op.emit("Shrink", op.x, lambd=op.number("alpha"), bias=op.number("alpha"))


@translates("threshold")
def threshold(op: Op) -> Value:
    """`x` above a threshold, another value elsewhere."""
    above = op.emit("Greater", op.x, op.scalar(op.number("threshold_val")))
    return op.emit("Where", above, op.x, op.scalar(op.number("value")))


@translates("leaky_relu")
def leaky_relu(op: Op) -> Value:
    """`alpha * x` below 0."""
    return op.emit("LeakyRelu", op.x, alpha=op.number("alpha"))


@translates("elu")
def elu(op: Op) -> Value:
    """`alpha * (exp(x) - 1)` below 0."""
    return op.emit("Elu", op.x, alpha=op.number("alpha"))


@translates("celu")
def celu(op: Op) -> Value:
    """`alpha * (exp(x / alpha) - 1)` below 0."""
    return op.emit("Celu", op.x, alpha=op.number("alpha"))


@translates("selu")
def selu(op: Op) -> Value:
    """ELU with the scale that keeps mean and variance."""
    return op.emit("Selu", op.x)


@translates("prelu")
def prelu(op: Op) -> Value:
    """`alpha * x` below 0, with an alpha for each channel."""
    return op.emit("PRelu", op.x, align_to_axis(op, op.inputs[1], 1))


@translates("clip_by_scalar", "clip_by_scalar_min", "clip_by_scalar_max")
def clip(op: Op) -> Value:
    """Clipped to a minimum, a maximum, or both."""
    prefix = "floating" if op.dtype.is_float else "integral"
    bounds = [
        None if op.operation.kind.endswith(other) else op.scalar(op.number(f"{prefix}_{end}"))
        for end, other in (("min", "_max"), ("max", "_min"))
    ]
    return op.emit("Clip", op.x, *bounds)


@translates("softmax", "log_softmax")
def softmax(op: Op) -> Value:
    """Along the last axis."""
    return op.emit("Softmax" if op.operation.kind == "softmax" else "LogSoftmax", op.x, axis=-1)
