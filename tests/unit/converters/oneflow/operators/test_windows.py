"""Convolutions and their windows beside PyTorch's."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional
from translating import check_operator, run_operator

from graphkiln_backend.graph.dtypes import AnyArray
from graphkiln_backend.graph.errors import ConversionError

CONVOLUTIONS = {1: functional.conv1d, 2: functional.conv2d, 3: functional.conv3d}
TRANSPOSED = {1: functional.conv_transpose1d, 2: functional.conv_transpose2d, 3: functional.conv_transpose3d}


def random(*shape: int) -> AnyArray:
    return np.random.default_rng(sum(shape)).standard_normal(shape).astype("f4")


def geometry(axes: int, stride: int = 1, padding: int = 0, dilation: int = 1, groups: int = 1) -> dict[str, Any]:
    return {
        "strides": [stride] * axes,
        "padding_before": [padding] * axes,
        "dilation_rate": [dilation] * axes,
        "groups": groups,
    }


@pytest.mark.parametrize(
    ("stride", "padding", "dilation", "groups"), [(1, 0, 1, 1), (2, 1, 1, 1), (1, 2, 2, 1), (3, 1, 1, 2), (1, 1, 1, 4)]
)
@pytest.mark.parametrize("axes", [1, 2, 3])
def test_convolutions(axes: int, stride: int, padding: int, dilation: int, groups: int) -> None:
    x, weight = random(2, 4, *[9] * axes), random(8, 4 // groups, *[3] * axes)
    expected = CONVOLUTIONS[axes](
        *map(torch.from_numpy, (x, weight)), stride=stride, padding=padding, dilation=dilation, groups=groups
    )
    attributes = {**geometry(axes, stride, padding, dilation, groups), "kernel_size": [3] * axes}
    check_operator(f"conv{axes}d", [x, weight], expected.numpy(), tolerance=1e-4, **attributes)


class TestOptionalOperands:
    X, WEIGHT, BIAS = random(2, 4, 7, 6), random(8, 4, 3, 2), random(8)

    def check(self, operands: list[AnyArray], sizes: list[int], expected: AnyArray) -> None:
        attributes = {**geometry(2), "kernel_size": [3, 2], "operand_segment_sizes": sizes}
        check_operator("conv2d", operands, expected, tolerance=1e-4, **attributes)

    def convolved(self, bias: AnyArray | None = None) -> AnyArray:
        x, weight = torch.from_numpy(self.X), torch.from_numpy(self.WEIGHT)
        found: AnyArray = functional.conv2d(x, weight, None if bias is None else torch.from_numpy(bias)).numpy()
        return found

    def test_a_bias(self) -> None:
        self.check([self.X, self.WEIGHT, self.BIAS], [1, 1, 1, 0], self.convolved(self.BIAS))

    def test_an_addend_without_a_bias(self) -> None:
        addend = random(2, 8, 5, 5)
        self.check([self.X, self.WEIGHT, addend], [1, 1, 0, 1], self.convolved() + addend)

    def test_both(self) -> None:
        addend = random(2, 8, 5, 5)
        self.check([self.X, self.WEIGHT, self.BIAS, addend], [1, 1, 1, 1], self.convolved(self.BIAS) + addend)


@pytest.mark.parametrize(
    ("stride", "padding", "output_padding", "groups"), [(1, 0, 0, 1), (2, 1, 1, 1), (3, 0, 2, 2), (2, 2, 0, 4)]
)
@pytest.mark.parametrize("axes", [1, 2, 3])
def test_transposed_convolutions(axes: int, stride: int, padding: int, output_padding: int, groups: int) -> None:
    x, weight = random(2, 4, *[5] * axes), random(4, 8 // groups, *[3] * axes)
    expected = TRANSPOSED[axes](
        *map(torch.from_numpy, (x, weight)),
        stride=stride,
        padding=padding,
        output_padding=output_padding,
        groups=groups,
    )
    attributes = {**geometry(axes, stride, padding, 1, groups), "output_padding": [output_padding] * axes}
    attributes["kernel_size"] = [3] * axes
    check_operator(f"deconv{axes}d", [x, weight], expected.numpy(), tolerance=1e-4, **attributes)


@pytest.mark.parametrize("kind", ["conv2d", "deconv2d", "unfold", "fold"])
def test_channels_last_are_rejected(kind: str) -> None:
    x = random(1, 2, 4, 4)
    attributes = {**geometry(2), "kernel_size": [1, 1], "data_format": "channels_last"}
    with pytest.raises(ConversionError, match="channels_last"):
        run_operator(kind, [x, random(2, 2, 1, 1)], [x], **attributes)


@pytest.mark.parametrize("axis", [0, 1, 3, -2])
def test_a_bias_along_an_axis(axis: int) -> None:
    x = random(2, 3, 4, 5)
    bias = random(x.shape[axis])
    shape = [1] * 4
    shape[axis] = -1
    check_operator("bias_add", [x, bias], x + bias.reshape(shape), axis=axis)


WINDOWS = [
    ([2, 2], [1, 1], [0, 0], [1, 1]),
    ([3, 2], [2, 1], [1, 0], [1, 1]),
    ([2, 3], [1, 2], [2, 1], [2, 1]),
    ([3, 3], [3, 3], [0, 1], [1, 2]),
]


@pytest.mark.parametrize(("kernel", "stride", "padding", "dilation"), WINDOWS)
class TestWindows:
    def test_unfold(self, kernel: list[int], stride: list[int], padding: list[int], dilation: list[int]) -> None:
        x = random(2, 3, 8, 9)
        expected = functional.unfold(torch.from_numpy(x), kernel, dilation, padding, stride).numpy()
        attributes = {"kernel_size": kernel, "strides": stride, "padding": padding, "dilation_rate": dilation}
        check_operator("unfold", [x], expected, **attributes)

    def test_fold(self, kernel: list[int], stride: list[int], padding: list[int], dilation: list[int]) -> None:
        size = [8, 9]
        columns = functional.unfold(torch.zeros(2, 3, *size), kernel, dilation, padding, stride)
        x = random(*columns.shape)
        expected = functional.fold(torch.from_numpy(x), size, kernel, dilation, padding, stride).numpy()
        attributes = {"kernel_size": kernel, "strides": stride, "padding": padding, "dilation_rate": dilation}
        check_operator("fold", [x], expected, output_size=size, **attributes)


# Pooling beside PyTorch's.

MAX = {1: functional.max_pool1d, 2: functional.max_pool2d, 3: functional.max_pool3d}
AVERAGE = {1: functional.avg_pool1d, 2: functional.avg_pool2d, 3: functional.avg_pool3d}
ADAPTIVE_AVERAGE = {
    1: functional.adaptive_avg_pool1d,
    2: functional.adaptive_avg_pool2d,
    3: functional.adaptive_avg_pool3d,
}
ADAPTIVE_MAX = {1: functional.adaptive_max_pool1d, 2: functional.adaptive_max_pool2d, 3: functional.adaptive_max_pool3d}


def windows(axes: int, kernel: int, stride: int, padding: int, **others: Any) -> dict[str, Any]:
    return {"kernel_size": [kernel] * axes, "stride": [stride] * axes, "padding": [padding] * axes, **others}


class TestMax:
    @pytest.mark.parametrize("ceil_mode", [True, False])
    @pytest.mark.parametrize("geometry", [(2, 2, 0, 1), (3, 2, 1, 1), (3, 1, 1, 2), (3, 2, 0, 1)])
    @pytest.mark.parametrize("axes", [1, 2, 3])
    def test_values_and_indices(self, axes: int, geometry: tuple[int, int, int, int], ceil_mode: bool) -> None:
        """Indices count through one channel of one sample, in every sample anew."""
        x = random(2, 3, *[8] * axes)
        values, indices = MAX[axes](torch.from_numpy(x), *geometry, ceil_mode=ceil_mode, return_indices=True)
        attributes = windows(axes, *geometry[:3], dilation=[geometry[3]] * axes, ceil_mode=ceil_mode)
        expected = [values.numpy(), indices.numpy()]
        check_operator(f"max_pool_{axes}d", [x], expected, return_indices=True, **attributes)
        check_operator(f"max_pool_{axes}d", [x], values.numpy(), **attributes)

    def test_channels_last(self) -> None:
        x = random(1, 4, 4, 2)
        with pytest.raises(ConversionError, match="channels_last"):
            run_operator("max_pool_2d", [x], [x], data_format="channels_last", **windows(2, 1, 1, 0))


class TestAverage:
    @pytest.mark.parametrize(
        ("geometry", "ceil_mode", "counted"),
        [((2, 2, 0), False, True), ((3, 2, 1), False, True), ((3, 2, 1), False, False), ((3, 2, 0), True, True)],
    )
    @pytest.mark.parametrize("axes", [1, 2, 3])
    def test_padding_counts_or_not(
        self, axes: int, geometry: tuple[int, int, int], ceil_mode: bool, counted: bool
    ) -> None:
        x = random(2, 3, *[8] * axes)
        expected = AVERAGE[axes](torch.from_numpy(x), *geometry, ceil_mode, counted).numpy()
        attributes = windows(axes, *geometry, ceil_mode=ceil_mode, count_include_pad=counted)
        check_operator(f"avg_pool_{axes}d", [x], expected, **attributes)

    @pytest.mark.parametrize("padding", [0, 1])
    @pytest.mark.parametrize("counted", [True, False])
    def test_another_divisor(self, padding: int, counted: bool) -> None:
        x = random(2, 3, 8, 8)
        expected = functional.avg_pool2d(torch.from_numpy(x), 3, 2, padding, False, counted, 5).numpy()
        attributes = windows(2, 3, 2, padding, divisor_override=5, count_include_pad=counted)
        check_operator("avg_pool_2d", [x], expected, **attributes)

    def test_another_divisor_with_ceil_mode(self) -> None:
        x = random(1, 1, 4, 4)
        with pytest.raises(ConversionError, match="divisor_override together with ceil_mode"):
            run_operator("avg_pool_2d", [x], [x], divisor_override=3, ceil_mode=True, **windows(2, 2, 2, 0))


class TestAdaptive:
    @pytest.mark.parametrize("axes", [1, 2, 3])
    @pytest.mark.parametrize("target", [1, 3, 4, 5, 8, 11])
    def test_means_of_windows_of_any_size(self, axes: int, target: int) -> None:
        x = random(2, 3, *[8] * axes)
        expected = ADAPTIVE_AVERAGE[axes](torch.from_numpy(x), target).numpy()
        check_operator(f"adaptive_avg_pool{axes}d", [x], expected)

    def test_other_sizes_along_each_axis(self) -> None:
        x = random(2, 3, 7, 12)
        expected = functional.adaptive_avg_pool2d(torch.from_numpy(x), (3, 5)).numpy()
        check_operator("adaptive_avg_pool2d", [x], expected)

    @pytest.mark.parametrize("axes", [1, 2, 3])
    @pytest.mark.parametrize("target", [1, 2, 4, 8])
    def test_maxima_of_windows_of_one_size(self, axes: int, target: int) -> None:
        x = random(2, 3, *[8] * axes)
        values, indices = ADAPTIVE_MAX[axes](torch.from_numpy(x), target, return_indices=True)
        check_operator(f"adaptive_max_pool{axes}d", [x], [values.numpy(), indices.numpy()])

    def test_maxima_of_windows_of_several_sizes(self) -> None:
        with pytest.raises(ConversionError, match=r"\[8, 8\] cannot be divided into \[3, 3\] windows"):
            run_operator("adaptive_max_pool2d", [random(1, 1, 8, 8)], [random(1, 1, 3, 3)])
