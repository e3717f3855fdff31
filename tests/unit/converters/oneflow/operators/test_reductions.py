"""Reductions, sorting and cumulative sums beside NumPy's."""

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


# Matrix products beside NumPy's.

GENERATOR = np.random.default_rng(0)
A, B = (GENERATOR.standard_normal((2, 4, 4)).astype("f4") for _ in range(2))


@pytest.mark.parametrize("transpose_a", [True, False])
@pytest.mark.parametrize("transpose_b", [True, False])
@pytest.mark.parametrize("kind", ["batch_matmul", "broadcast_matmul"])
def test_either_side_may_be_transposed(kind: str, transpose_a: bool, transpose_b: bool) -> None:
    a, b = A.swapaxes(1, 2) if transpose_a else A, B.swapaxes(1, 2) if transpose_b else B
    check_operator(kind, [A, B], a @ b, transpose_a=transpose_a, transpose_b=transpose_b)


def test_of_matrices_that_are_not_square() -> None:
    a, b = A[0, :3], B[0, :2]
    check_operator("matmul", [a, b], a @ b.T, transpose_b=True)


def test_a_batch_and_one_matrix() -> None:
    check_operator("broadcast_matmul", [A, B[0]], A @ B[0])


@pytest.mark.parametrize("alpha", [1.0, 0.125, -2.0])
def test_a_factor(alpha: float) -> None:
    check_operator("matmul", [A[0], B[0]], np.float32(alpha) * (A[0] @ B[0]), alpha=alpha)


def test_an_addend_is_not_scaled() -> None:
    check_operator("matmul", [A[0], B[0], A[1]], 0.5 * (A[0] @ B[0]) + A[1], alpha=0.5)


def test_sizes_that_do_not_fit() -> None:
    with pytest.raises(ConversionError, match="do not fit each other: MatMul"):
        run_operator("matmul", [A[0], B[0, :3]], [A[0]])


# Normalizations beside PyTorch's.

X_OF_NORMALIZATION = GENERATOR.standard_normal((2, 6, 4, 5)).astype("f4")


def parameters(count: int) -> list[AnyArray]:
    """Mean, variance, gamma, beta."""
    numbers = GENERATOR.standard_normal((4, count)).astype("f4")
    return [numbers[0], np.abs(numbers[1]) + 0.1, numbers[2], numbers[3]]


def batch_norm(x: AnyArray, numbers: list[AnyArray], axis: int = 1) -> AnyArray:
    first = torch.from_numpy(x).transpose(1, axis)
    found: AnyArray = functional.batch_norm(first, *map(torch.from_numpy, numbers), eps=1e-3).transpose(1, axis).numpy()
    return found


class TestBatchNorm:
    @pytest.mark.parametrize("axis", [1, 2, 3, -1])
    def test_along_any_axis(self, axis: int) -> None:
        numbers = parameters(X_OF_NORMALIZATION.shape[axis])
        expected = np.ascontiguousarray(batch_norm(X_OF_NORMALIZATION, numbers, axis))
        check_operator(
            "normalization", [X_OF_NORMALIZATION, *numbers], expected, axis=axis, epsilon=1e-3, training=False
        )

    def test_of_the_inference_form_with_an_addend(self) -> None:
        numbers, addend = parameters(6), X_OF_NORMALIZATION * 2
        check_operator(
            "normalization_infer",
            [X_OF_NORMALIZATION, *numbers, addend],
            batch_norm(X_OF_NORMALIZATION, numbers) + addend,
            axis=1,
            epsilon=1e-3,
        )

    def test_in_training_mode_is_rejected(self) -> None:
        with pytest.raises(ConversionError, match=r"saved in training mode: call model\.eval\(\)"):
            run_operator(
                "normalization",
                [X_OF_NORMALIZATION, *parameters(6)],
                [X_OF_NORMALIZATION],
                axis=1,
                epsilon=1e-5,
                training=True,
            )

    def test_without_running_statistics_is_rejected(self) -> None:
        gamma, beta = parameters(6)[2:]
        with pytest.raises(ConversionError, match="no running statistics"):
            run_operator(
                "normalization",
                [X_OF_NORMALIZATION, gamma, beta],
                [X_OF_NORMALIZATION],
                axis=1,
                epsilon=1e-5,
                training=False,
                operand_segment_sizes=[1, 0, 0, 1, 1, 0],
            )


class TestLayerNorm:
    @pytest.mark.parametrize("axis", [1, 3, -1])
    @pytest.mark.parametrize(("scale", "center"), [(True, True), (True, False), (False, True), (False, False)])
    def test_with_and_without_parameters(self, axis: int, scale: bool, center: bool) -> None:
        shape = X_OF_NORMALIZATION.shape[axis:] if axis > 0 else X_OF_NORMALIZATION.shape[-1:]
        gamma, beta = (GENERATOR.standard_normal(shape).astype("f4") for _ in range(2))
        expected = functional.layer_norm(
            torch.from_numpy(X_OF_NORMALIZATION),
            shape,
            torch.from_numpy(gamma) if scale else None,
            torch.from_numpy(beta) if center else None,
            eps=1e-4,
        )
        operands = [X_OF_NORMALIZATION, *[beta] * center, *[gamma] * scale]  # OneFlow's order
        attributes: dict[str, Any] = {"begin_norm_axis": axis, "begin_params_axis": axis, "epsilon": 1e-4}
        check_operator("layer_norm", operands, expected.numpy(), scale=scale, center=center, **attributes)

    def test_parameters_of_other_axes(self) -> None:
        with pytest.raises(ConversionError, match="begin_params_axis is not begin_norm_axis"):
            run_operator(
                "layer_norm",
                [X_OF_NORMALIZATION],
                [X_OF_NORMALIZATION],
                begin_norm_axis=2,
                begin_params_axis=3,
                epsilon=1e-5,
            )

    def test_a_parameter_is_missing(self) -> None:
        with pytest.raises(ConversionError, match="scale is True, center is True, but it has 1 parameters"):
            run_operator(
                "layer_norm",
                [X_OF_NORMALIZATION, X_OF_NORMALIZATION[0, 0, 0]],
                [X_OF_NORMALIZATION],
                begin_norm_axis=3,
                epsilon=1e-5,
                scale=True,
                center=True,
            )


class TestGroupNorm:
    @pytest.mark.parametrize("groups", [1, 2, 6])
    def test_with_and_without_parameters(self, groups: int) -> None:
        gamma, beta = (GENERATOR.standard_normal(6).astype("f4") for _ in range(2))
        x = torch.from_numpy(X_OF_NORMALIZATION)
        attributes = {"num_groups": groups, "epsilon": 1e-4}
        plain = functional.group_norm(x, groups, eps=1e-4).numpy()
        check_operator("group_norm", [X_OF_NORMALIZATION], plain, affine=False, **attributes)
        expected = functional.group_norm(x, groups, *map(torch.from_numpy, (gamma, beta)), eps=1e-4).numpy()
        check_operator("group_norm", [X_OF_NORMALIZATION, beta, gamma], expected, affine=True, **attributes)

    def test_an_activation_inside(self) -> None:
        with pytest.raises(ConversionError, match="activation 'silu' cannot be translated"):
            run_operator(
                "group_norm", [X_OF_NORMALIZATION], [X_OF_NORMALIZATION], num_groups=2, epsilon=1e-5, activation="silu"
            )


@pytest.mark.parametrize("axis", [1, -1])
def test_l2(axis: int) -> None:
    x = X_OF_NORMALIZATION.copy()
    x[0] = 0  # its length is that of epsilon
    squares = (x**2).sum(axis, keepdims=True)
    expected = x / np.sqrt(np.maximum(squares, 1e-6))
    check_operator("l2_normalize", [x], [expected, squares], axis=axis, epsilon=1e-6)
