"""Pooling beside PyTorch's."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional
from translating import check_operator, run_operator

from graphkiln_backend.graph.dtypes import AnyArray
from graphkiln_backend.graph.errors import ConversionError

MAX = {1: functional.max_pool1d, 2: functional.max_pool2d, 3: functional.max_pool3d}
AVERAGE = {1: functional.avg_pool1d, 2: functional.avg_pool2d, 3: functional.avg_pool3d}
ADAPTIVE_AVERAGE = {
    1: functional.adaptive_avg_pool1d,
    2: functional.adaptive_avg_pool2d,
    3: functional.adaptive_avg_pool3d,
}
ADAPTIVE_MAX = {1: functional.adaptive_max_pool1d, 2: functional.adaptive_max_pool2d, 3: functional.adaptive_max_pool3d}


def random(*shape: int) -> AnyArray:
    return np.random.default_rng(sum(shape)).standard_normal(shape).astype("f4")


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
