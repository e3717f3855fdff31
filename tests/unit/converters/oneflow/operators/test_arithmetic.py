"""Operations of two tensors or a tensor and a scalar, beside NumPy's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from translating import check_operator, run_operator

from graphkiln_backend.graph.dtypes import AnyArray
from graphkiln_backend.graph.errors import ConversionError

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
