"""Elementwise functions beside NumPy's and PyTorch's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional
from translating import check_operator

from graphkiln_backend.graph.dtypes import AnyArray

X = np.concatenate([np.linspace(-6, 6, 41), [0.5, -0.5, 3, -3]]).astype("f4").reshape(3, 15)
UNIT = np.linspace(-0.95, 0.95, 12, dtype="f4").reshape(3, 4)
POSITIVE = np.geomspace(1e-3, 1e3, 12, dtype="f4").reshape(3, 4)

NUMPY: dict[str, tuple[Callable[..., Any], AnyArray]] = {
    "sigmoid": (lambda x: 1 / (1 + np.exp(-x)), X),
    "tanh": (np.tanh, X),
    "exp": (np.exp, X),
    "log": (np.log, POSITIVE),
    "abs": (np.abs, X),
    "sqrt": (np.sqrt, POSITIVE),
    "rsqrt": (lambda x: 1 / np.sqrt(x), POSITIVE),
    "floor": (np.floor, X),
    "ceil": (np.ceil, X),
    "round": (np.round, np.array([-2.5, -1.5, -0.5, 0.5, 1.5, 2.4], "f4")),
    "sign": (np.sign, X),
    "negative": (np.negative, X),
    "reciprocal": (np.reciprocal, POSITIVE),
    "square": (np.square, X),
    "sin": (np.sin, X),
    "cos": (np.cos, X),
    "tan": (np.tan, UNIT),
    "asin": (np.arcsin, UNIT),
    "acos": (np.arccos, UNIT),
    "atan": (np.arctan, X),
    "sinh": (np.sinh, UNIT),
    "cosh": (np.cosh, UNIT),
    "asinh": (np.arcsinh, X),
    "acosh": (np.arccosh, POSITIVE + 1),
    "atanh": (np.arctanh, UNIT),
    "log1p": (np.log1p, POSITIVE),
    "expm1": (np.expm1, UNIT),
    "relu": (lambda x: np.maximum(x, 0), X),
    "identity": (np.copy, X),
}

TORCH: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], dict[str, Any]]] = {
    "erf": (torch.erf, {}),
    "gelu": (functional.gelu, {}),
    "fast_gelu": (lambda x: functional.gelu(x, approximate="tanh"), {}),
    "quick_gelu": (lambda x: x * torch.sigmoid(1.702 * x), {}),
    "silu": (functional.silu, {}),
    "mish": (functional.mish, {}),
    "log_sigmoid": (functional.logsigmoid, {}),
    "softsign": (functional.softsign, {}),
    "hardswish": (functional.hardswish, {}),
    "hardsigmoid": (functional.hardsigmoid, {}),
    "hardtanh": (lambda x: functional.hardtanh(x, -0.5, 2.0), {"min_val": -0.5, "max_val": 2.0}),
    "hardshrink": (lambda x: functional.hardshrink(x, 0.5), {"lambd": 0.5}),
    "softshrink": (lambda x: functional.softshrink(x, 0.5), {"alpha": 0.5}),
    "threshold": (lambda x: functional.threshold(x, 0.5, -7.0), {"threshold_val": 0.5, "value": -7.0}),
    "leaky_relu": (lambda x: functional.leaky_relu(x, 0.1), {"alpha": 0.1}),
    "elu": (lambda x: functional.elu(x, 1.5), {"alpha": 1.5}),
    "celu": (lambda x: functional.celu(x, 1.5), {"alpha": 1.5}),
    "selu": (functional.selu, {}),
    "softmax": (lambda x: x.softmax(-1), {}),
    "log_softmax": (lambda x: x.log_softmax(-1), {}),
}


@pytest.mark.parametrize("kind", NUMPY)
def test_beside_numpy(kind: str) -> None:
    function, x = NUMPY[kind]
    check_operator(kind, [x], function(x.astype("f8")).astype("f4"))


@pytest.mark.parametrize("kind", TORCH)
def test_beside_pytorch(kind: str) -> None:
    function, attributes = TORCH[kind]
    check_operator(kind, [X], function(torch.from_numpy(X)).numpy(), **attributes)


def test_fast_gelu_has_all_digits_of_its_coefficient() -> None:
    x = np.linspace(-2.5, -1.5, 11)
    check_operator("fast_gelu", [x], functional.gelu(torch.from_numpy(x), approximate="tanh").numpy(), tolerance=1e-7)


@pytest.mark.parametrize("kind", ["isnan", "isinf"])
def test_of_what_is_no_number(kind: str) -> None:
    x = np.array([1, np.nan, np.inf, -np.inf, 0], "f4")
    check_operator(kind, [x], getattr(np, kind)(x))


@pytest.mark.parametrize("axis", [1, 3, -1])
def test_gelu_of_a_sum_with_a_bias(axis: int) -> None:
    x = np.linspace(-3, 3, 2 * 3 * 4 * 5, dtype="f4").reshape(2, 3, 4, 5)
    bias = np.linspace(-1, 1, x.shape[axis], dtype="f4")
    shape = [1] * 4
    shape[axis] = -1
    expected = functional.gelu(torch.from_numpy(x + bias.reshape(shape))).numpy()
    check_operator("fused_bias_add_gelu", [x, bias], expected, axis=axis)


def test_prelu_has_a_slope_for_each_channel() -> None:
    x = np.linspace(-3, 3, 2 * 3 * 4, dtype="f4").reshape(2, 3, 4)
    slope = np.array([0.1, 0.5, 2.0], "f4")
    expected = functional.prelu(torch.from_numpy(x), torch.from_numpy(slope)).numpy()
    check_operator("prelu", [x, slope], expected)


FLOATS = {"floating_min": -0.5, "floating_max": 1.5, "integral_min": 0, "integral_max": 0}
INTEGERS = {"floating_min": 0.0, "floating_max": 0.0, "integral_min": -2, "integral_max": 3}


class TestClip:
    @pytest.mark.parametrize(
        ("kind", "least", "most"),
        [
            ("clip_by_scalar", -0.5, 1.5),
            ("clip_by_scalar_min", -0.5, np.inf),
            ("clip_by_scalar_max", -np.inf, 1.5),
        ],
    )
    def test_floats(self, kind: str, least: float, most: float) -> None:
        check_operator(kind, [X], np.clip(X, least, most).astype("f4"), **FLOATS)

    @pytest.mark.parametrize("dtype", ["i4", "i8"])
    def test_integers_have_bounds_of_their_own(self, dtype: str) -> None:
        x = np.arange(-5, 6).astype(dtype)
        check_operator("clip_by_scalar", [x], np.clip(x, -2, 3), **INTEGERS)
