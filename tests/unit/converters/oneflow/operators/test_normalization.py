"""Normalizations beside PyTorch's."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional
from translating import check_operator, run_operator

from graphkiln_backend.graph.dtypes import AnyArray
from graphkiln_backend.graph.errors import ConversionError

GENERATOR = np.random.default_rng(0)
X = GENERATOR.standard_normal((2, 6, 4, 5)).astype("f4")


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
        numbers = parameters(X.shape[axis])
        expected = np.ascontiguousarray(batch_norm(X, numbers, axis))
        check_operator("normalization", [X, *numbers], expected, axis=axis, epsilon=1e-3, training=False)

    def test_of_the_inference_form_with_an_addend(self) -> None:
        numbers, addend = parameters(6), X * 2
        check_operator(
            "normalization_infer", [X, *numbers, addend], batch_norm(X, numbers) + addend, axis=1, epsilon=1e-3
        )

    def test_in_training_mode_is_rejected(self) -> None:
        with pytest.raises(ConversionError, match=r"saved in training mode: call model\.eval\(\)"):
            run_operator("normalization", [X, *parameters(6)], [X], axis=1, epsilon=1e-5, training=True)

    def test_without_running_statistics_is_rejected(self) -> None:
        gamma, beta = parameters(6)[2:]
        with pytest.raises(ConversionError, match="no running statistics"):
            run_operator(
                "normalization",
                [X, gamma, beta],
                [X],
                axis=1,
                epsilon=1e-5,
                training=False,
                operand_segment_sizes=[1, 0, 0, 1, 1, 0],
            )


class TestLayerNorm:
    @pytest.mark.parametrize("axis", [1, 3, -1])
    @pytest.mark.parametrize(("scale", "center"), [(True, True), (True, False), (False, True), (False, False)])
    def test_with_and_without_parameters(self, axis: int, scale: bool, center: bool) -> None:
        shape = X.shape[axis:] if axis > 0 else X.shape[-1:]
        gamma, beta = (GENERATOR.standard_normal(shape).astype("f4") for _ in range(2))
        expected = functional.layer_norm(
            torch.from_numpy(X),
            shape,
            torch.from_numpy(gamma) if scale else None,
            torch.from_numpy(beta) if center else None,
            eps=1e-4,
        )
        operands = [X, *[beta] * center, *[gamma] * scale]  # OneFlow's order
        attributes: dict[str, Any] = {"begin_norm_axis": axis, "begin_params_axis": axis, "epsilon": 1e-4}
        check_operator("layer_norm", operands, expected.numpy(), scale=scale, center=center, **attributes)

    def test_parameters_of_other_axes(self) -> None:
        with pytest.raises(ConversionError, match="begin_params_axis is not begin_norm_axis"):
            run_operator("layer_norm", [X], [X], begin_norm_axis=2, begin_params_axis=3, epsilon=1e-5)

    def test_a_parameter_is_missing(self) -> None:
        with pytest.raises(ConversionError, match="scale is True, center is True, but it has 1 parameters"):
            run_operator("layer_norm", [X, X[0, 0, 0]], [X], begin_norm_axis=3, epsilon=1e-5, scale=True, center=True)


class TestGroupNorm:
    @pytest.mark.parametrize("groups", [1, 2, 6])
    def test_with_and_without_parameters(self, groups: int) -> None:
        gamma, beta = (GENERATOR.standard_normal(6).astype("f4") for _ in range(2))
        x = torch.from_numpy(X)
        attributes = {"num_groups": groups, "epsilon": 1e-4}
        plain = functional.group_norm(x, groups, eps=1e-4).numpy()
        check_operator("group_norm", [X], plain, affine=False, **attributes)
        expected = functional.group_norm(x, groups, *map(torch.from_numpy, (gamma, beta)), eps=1e-4).numpy()
        check_operator("group_norm", [X, beta, gamma], expected, affine=True, **attributes)

    def test_an_activation_inside(self) -> None:
        with pytest.raises(ConversionError, match="activation 'silu' cannot be translated"):
            run_operator("group_norm", [X], [X], num_groups=2, epsilon=1e-5, activation="silu")


@pytest.mark.parametrize("axis", [1, -1])
def test_l2(axis: int) -> None:
    x = X.copy()
    x[0] = 0  # its length is that of epsilon
    squares = (x**2).sum(axis, keepdims=True)
    expected = x / np.sqrt(np.maximum(squares, 1e-6))
    check_operator("l2_normalize", [x], [expected, squares], axis=axis, epsilon=1e-6)
