"""Elementwise functions beside NumPy's and PyTorch's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional
from translating import check_operator, run_operator

from graphkiln_backend.graph.dtypes import AnyArray
from graphkiln_backend.graph.errors import ConversionError

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


# Operations of two tensors or a tensor and a scalar, beside NumPy's.

A = np.linspace(-4, 4, 24, dtype="f4").reshape(2, 3, 4)
ROW = np.array([0.5, -1.5, 2, 3], "f4")
COLUMN = np.array([[1.0], [2.0], [-0.5]], "f4")
FLOAT = {"has_float_operand": True, "has_int_operand": False, "float_operand": 1.5, "int_operand": 0}
INTEGER = {"has_float_operand": False, "has_int_operand": True, "float_operand": 0.0, "int_operand": 3}

BINARY: dict[str, Callable[..., Any]] = {
    "broadcast_add": np.add,
    "broadcast_sub": np.subtract,
    "broadcast_mul": np.multiply,
    "broadcast_div": np.divide,
    "broadcast_maximum": np.maximum,
    "broadcast_minimum": np.minimum,
    "broadcast_fmod": np.fmod,
    "floordiv": np.floor_divide,
}
COMPARISONS: dict[str, Callable[..., Any]] = {
    "equal": np.equal,
    "not_equal": np.not_equal,
    "greater": np.greater,
    "greater_equal": np.greater_equal,
    "less": np.less,
    "less_equal": np.less_equal,
}


class TestBinary:
    @pytest.mark.parametrize("other", [ROW, COLUMN, np.array([2.5], "f4")], ids=["row", "column", "one"])
    @pytest.mark.parametrize("kind", BINARY)
    def test_shapes_broadcast_as_numpys(self, kind: str, other: AnyArray) -> None:
        check_operator(kind, [A, other], BINARY[kind](A, other))

    @pytest.mark.parametrize("kind", ["pow", "broadcast_pow"])
    def test_powers(self, kind: str) -> None:
        check_operator(kind, [np.abs(A), ROW[None, None]], np.abs(A) ** ROW, tolerance=1e-4)

    @pytest.mark.parametrize("count", [1, 2, 3])
    def test_sums_of_several(self, count: int) -> None:
        check_operator("add_n", [A] * count, A * count)

    def test_integers_keep_their_type(self) -> None:
        x = np.arange(-6, 6).reshape(3, 4)
        check_operator("broadcast_mul", [x, x], x * x)

    def test_the_remainder_has_the_sign_of_the_dividend(self) -> None:
        x, y = np.array([5.5, -5.5, 5.5, -5.5], "f4"), np.array([3, 3, -3, -3], "f4")
        check_operator("broadcast_fmod", [x, y], np.array([2.5, -2.5, 2.5, -2.5], "f4"))
        whole = np.array([-7, 7, -7, 7]), np.array([3, 3, -3, -3])
        check_operator("broadcast_fmod", whole, np.array([-1, 1, -1, 1]))

    def test_integers_are_not_divided_and_rounded_down(self) -> None:
        """ONNX's division of integers rounds towards zero."""
        x = np.array([-7, 7])
        with pytest.raises(ConversionError, match="rounds a negative quotient of integers towards zero"):
            run_operator("floordiv", [x, x], [x])

    def test_angles_of_all_quadrants(self) -> None:
        y, x = (axis.ravel().astype("f4") for axis in np.meshgrid([-2.0, -0.5, 0.0, 0.5, 2.0], [-1.0, 0.0, 1.0]))
        check_operator("atan2", [y, x], np.arctan2(y, x))


class TestScalars:
    @pytest.mark.parametrize(
        ("kind", "function"),
        [
            ("scalar_add", np.add),
            ("scalar_mul", np.multiply),
            ("scalar_div", np.divide),
            ("scalar_fmod", np.fmod),
            ("scalar_floordiv", np.floor_divide),
        ],
    )
    @pytest.mark.parametrize(("operand", "number"), [(FLOAT, 1.5), (INTEGER, 3)], ids=["float", "integer"])
    def test_a_number_takes_the_tensors_type(
        self, kind: str, function: Callable[..., Any], operand: dict[str, Any], number: float
    ) -> None:
        check_operator(kind, [A], function(A, np.float32(number)), **operand)

    def test_an_integer_tensor(self) -> None:
        x = np.arange(-3, 3)
        check_operator("scalar_add", [x], x + 3, **INTEGER)

    def test_powers_in_both_orders(self) -> None:
        check_operator("scalar_pow", [np.abs(A)], np.abs(A) ** np.float32(1.5), **FLOAT)
        check_operator("scalar_reverse_pow", [A], np.float32(1.5) ** A, **FLOAT)


class TestComparisons:
    @pytest.mark.parametrize("kind", COMPARISONS)
    def test_of_two_tensors(self, kind: str) -> None:
        x, y = np.array([[1, 2, 3]], "f4"), np.array([[3], [2], [1]], "f4")
        check_operator(f"broadcast_{kind}", [x, y], COMPARISONS[kind](x, y))

    @pytest.mark.parametrize("kind", COMPARISONS)
    def test_with_a_scalar(self, kind: str) -> None:
        x = np.array([1, 1.5, 2], "f4")
        check_operator(f"scalar_logical_{kind}", [x], COMPARISONS[kind](x, 1.5), **FLOAT)

    @pytest.mark.parametrize(
        ("kind", "function"), [("and", np.logical_and), ("or", np.logical_or), ("xor", np.logical_xor)]
    )
    def test_logic_of_numbers(self, kind: str, function: Callable[..., Any]) -> None:
        """All that is not 0 is true, negative numbers and fractions too."""
        x, y = np.array([0, 0, -2, 0.5], "f4"), np.array([0, 3, 0, 1], "f4")
        check_operator(f"broadcast_logical_{kind}", [x, y], function(x, y))

    def test_not(self) -> None:
        x = np.array([0, 0.5, -1], "f4")
        check_operator("logical_not", [x], np.logical_not(x))


class TestSelection:
    CONDITION = np.array([[True], [False], [True]])

    def test_of_two_tensors(self) -> None:
        check_operator("where", [self.CONDITION, A, ROW], np.where(self.CONDITION, A, ROW))

    def test_a_condition_of_numbers(self) -> None:
        condition = np.array([0, 1, -1, 0], "i4")
        check_operator("where", [condition, A, A + 1], np.where(condition != 0, A, A + 1))

    @pytest.mark.parametrize(("kind", "scalar_first"), [("where_scalar_x", True), ("where_scalar_y", False)])
    def test_of_a_tensor_and_a_scalar(self, kind: str, scalar_first: bool) -> None:
        x, y = (np.float32(1.5), A) if scalar_first else (A, np.float32(1.5))
        check_operator(kind, [self.CONDITION, A], np.where(self.CONDITION, x, y), **FLOAT)

    @pytest.mark.parametrize(
        ("attributes", "dtype"),
        [
            ({"has_x_float_operand": True, "x_float_operand": 0.5, "y_float_operand": -2.5}, "f4"),
            ({"has_x_float_operand": False, "x_int_operand": 4, "y_int_operand": -2}, "i8"),
        ],
    )
    def test_of_two_scalars(self, attributes: dict[str, Any], dtype: str) -> None:
        x, y = (0.5, -2.5) if dtype == "f4" else (4, -2)
        check_operator("where_scalar_xy", [self.CONDITION], np.where(self.CONDITION, x, y).astype(dtype), **attributes)

    def test_a_mask_is_filled(self) -> None:
        mask = A > 0
        check_operator("masked_fill", [A, mask], np.where(mask, np.float32(1.5), A), **FLOAT)


@pytest.mark.parametrize(("source", "target"), [("f4", "i8"), ("i4", "f4"), ("f4", "?"), ("f8", "f4")])
def test_casts(source: str, target: str) -> None:
    x = np.array([-1.7, 0, 0.4, 2.9]).astype(source)
    check_operator("cast", [x], x.astype(target))
