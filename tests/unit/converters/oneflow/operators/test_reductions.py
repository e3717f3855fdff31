"""Reductions, sorting and cumulative sums beside NumPy's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from translating import check_operator

X = np.random.default_rng(0).standard_normal((2, 3, 4)).astype("f4")
REDUCTIONS: dict[str, Callable[..., Any]] = {
    "reduce_sum": np.sum,
    "reduce_max": np.max,
    "reduce_min": np.min,
    "reduce_prod": np.prod,
}


@pytest.mark.parametrize("keepdims", [True, False])
@pytest.mark.parametrize("axes", [[0], [1], [-1], [0, 2], [2, 0], [0, 1, 2]])
class TestAxes:
    @pytest.mark.parametrize("kind", REDUCTIONS)
    def test_are_reduced(self, kind: str, axes: list[int], keepdims: bool) -> None:
        expected = np.asarray(REDUCTIONS[kind](X, axis=tuple(axes), keepdims=keepdims), "f4")
        check_operator(kind, [X], expected, axis=axes, keepdims=keepdims)

    @pytest.mark.parametrize("unbiased", [True, False])
    def test_variance(self, axes: list[int], keepdims: bool, unbiased: bool) -> None:
        expected = np.asarray(X.var(tuple(axes), ddof=int(unbiased), keepdims=keepdims), "f4")
        check_operator("var", [X], expected, dim=axes, keepdim=keepdims, unbiased=unbiased)


def test_without_axes_all_are_reduced() -> None:
    check_operator("reduce_sum", [X], np.asarray(X.sum()), axis=[])


def test_the_unbiased_variance_of_one_element() -> None:
    """Its divisor would be 0; OneFlow answers 0, and so do we."""
    x = X[:, :1]
    check_operator("var", [x], np.zeros((2, 4), "f4"), dim=[1], keepdim=False, unbiased=True)


@pytest.mark.parametrize(("kind", "function"), [("reduce_any", np.any), ("reduce_all", np.all)])
@pytest.mark.parametrize("dtype", ["?", "f4", "i4"])
def test_truth_of_any_type(kind: str, function: Callable[..., Any], dtype: str) -> None:
    x = np.array([[0, 0, 0], [0, 2, 0], [1, -1, 3]]).astype(dtype)
    check_operator(kind, [x], function(x, axis=1), axis=[1], keepdims=False)
    check_operator(kind, [x], function(x, axis=(0, 1), keepdims=True), axis=[0, 1], keepdims=True)


def test_a_small_fraction_is_true() -> None:
    x = np.array([[1e-30, 0.5]], "f4")
    check_operator("reduce_all", [x], np.array([True]), axis=[1])


class TestOrder:
    def test_the_first_of_equal_maxima(self) -> None:
        x = np.array([[1, 5, 5], [7, 2, 7]], "f4")
        check_operator("argmax", [x], np.array([1, 0]))

    @pytest.mark.parametrize("k", [1, 3])
    def test_the_k_largest(self, k: int) -> None:
        check_operator("top_k", [X], np.argsort(-X, axis=-1)[..., :k], k=k)

    @pytest.mark.parametrize(("direction", "sign"), [("ASCENDING", 1), ("DESCENDING", -1)])
    def test_sorting(self, direction: str, sign: int) -> None:
        check_operator("arg_sort", [X], np.argsort(sign * X, axis=-1).astype("i4"), direction=direction)


@pytest.mark.parametrize("dim", [0, 1, -1])
def test_cumulative_sums(dim: int) -> None:
    check_operator("cumsum", [X], X.cumsum(dim), dim=dim)
