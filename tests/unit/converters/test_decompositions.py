"""Backward operators beside autograd's own, for many geometries."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional

from graphkiln_converters import decompositions
from graphkiln_converters.decompositions import (
    avg_pool2d_backward,
    backward_decompositions,
    convolution_backward,
    empty_permuted,
    max_pool2d_backward,
)

aten = torch.ops.aten
CONVOLUTIONS = {1: functional.conv1d, 2: functional.conv2d, 3: functional.conv3d}
TRANSPOSED = {1: functional.conv_transpose1d, 2: functional.conv_transpose2d, 3: functional.conv_transpose3d}


def random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(sum(shape)))


def gradients(function: Callable[..., torch.Tensor], *inputs: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Of an output's gradient that differs in every element: that gradient, and those of the inputs."""
    derived = [tensor.clone().requires_grad_() for tensor in inputs]
    output = function(*derived)
    gradient = random(*output.shape)
    return gradient, list(torch.autograd.grad(output, derived, gradient))


# stride, padding, dilation, groups
GEOMETRIES = [
    (1, 0, 1, 1),
    (1, 1, 1, 2),
    (1, 2, 2, 1),
    (2, 1, 1, 1),
    (3, 0, 2, 4),
    (1, 4, 1, 1),  # more padding than the kernel reaches
    (2, 3, 1, 2),
]


class TestConvolution:
    @pytest.mark.parametrize("geometry", GEOMETRIES)
    @pytest.mark.parametrize("axes", [1, 2, 3])
    @pytest.mark.parametrize("batch", [1, 3])
    def test_plain(self, batch: int, axes: int, geometry: tuple[int, int, int, int]) -> None:
        stride, padding, dilation = ([number] * axes for number in geometry[:3])
        groups = geometry[3]
        x, weight, bias = random(batch, 4, *[8] * axes), random(8, 4 // groups, *[3] * axes), random(8)
        options = {"stride": stride, "padding": padding, "dilation": dilation, "groups": groups}
        gradient, expected = gradients(lambda *inputs: CONVOLUTIONS[axes](*inputs, **options), x, weight, bias)
        rest = ([8], stride, padding, dilation, False, [0] * axes, groups, [True, True, True])
        for found, reference in zip(convolution_backward(gradient, x, weight, *rest), expected, strict=True):
            torch.testing.assert_close(found, reference)

    @pytest.mark.parametrize(
        ("stride", "padding", "output_padding", "groups"), [(1, 0, 0, 1), (2, 1, 1, 1), (2, 0, 0, 2), (3, 1, 2, 4)]
    )
    @pytest.mark.parametrize("axes", [1, 2])
    def test_transposed(self, axes: int, stride: int, padding: int, output_padding: int, groups: int) -> None:
        x, weight, bias = random(2, 4, *[5] * axes), random(4, 8 // groups, *[3] * axes), random(8)
        options = {"stride": stride, "padding": padding, "output_padding": output_padding, "groups": groups}
        gradient, expected = gradients(lambda *inputs: TRANSPOSED[axes](*inputs, **options), x, weight, bias)
        lists = [[number] * axes for number in (stride, padding, 1)]
        rest = ([8], *lists, True, [output_padding] * axes, groups, [True, True, True])
        for found, reference in zip(convolution_backward(gradient, x, weight, *rest), expected, strict=True):
            torch.testing.assert_close(found, reference)

    def test_of_kernels_that_are_not_square(self) -> None:
        x, weight = random(2, 3, 9, 7), random(5, 3, 1, 4)
        options = {"stride": (2, 1), "padding": (0, 2), "dilation": (1, 2)}
        gradient, expected = gradients(lambda *inputs: functional.conv2d(*inputs, **options), x, weight)
        rest = ([0], [2, 1], [0, 2], [1, 2], False, [0, 0], 1, [True, True, False])
        *found, bias = convolution_backward(gradient, x, weight, *rest)
        assert bias is None
        torch.testing.assert_close(found, expected)

    def test_a_remainder_that_no_window_covers(self) -> None:
        """A stride of 2 over 8 elements leaves the last one out: its gradient is zero."""
        x, weight = random(1, 1, 8), random(1, 1, 3)
        gradient, (expected, _) = gradients(lambda *inputs: functional.conv1d(*inputs, stride=2), x, weight)
        found, *_ = convolution_backward(gradient, x, weight, [0], [2], [0], [1], False, [0], 1, [True, False, False])
        torch.testing.assert_close(found, expected)
        assert found[0, 0, -1] == 0

    @pytest.mark.parametrize("mask", [[True, False, False], [False, True, False], [False, False, True], [False] * 3])
    def test_only_what_is_needed_is_computed(self, mask: list[bool]) -> None:
        x, weight = random(1, 2, 5, 5), random(2, 2, 3, 3)
        rest = ([2], [1, 1], [0, 0], [1, 1], False, [0, 0], 1, mask)
        found = convolution_backward(functional.conv2d(x, weight), x, weight, *rest)
        assert [tensor is not None for tensor in found] == mask

    def test_with_strides_of_one_no_convolution_is_transposed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Runtimes do plain ones far better."""
        kinds = []
        original = aten.convolution

        def convolution(*arguments: Any) -> Any:
            kinds.append(arguments[6])
            return original(*arguments)

        monkeypatch.setattr(decompositions, "_aten", type("Aten", (), {"convolution": staticmethod(convolution)}))
        x, weight = random(1, 2, 5, 5), random(2, 2, 3, 3)
        for stride in (1, 2):
            gradient = functional.conv2d(x, weight, stride=stride)
            rest = ([2], [stride] * 2, [0, 0], [1, 1], False, [0, 0], 1, [True, False, False])
            convolution_backward(gradient, x, weight, *rest)
        assert kinds == [False, True]


class TestPooling:
    @pytest.mark.parametrize(
        "arguments",
        [
            ([2, 2], [2, 2], [0, 0], [1, 1], False),
            ([3, 3], [1, 1], [1, 1], [1, 1], False),  # an element may be the maximum of several windows
            ([3, 2], [2, 1], [1, 0], [1, 2], False),
            ([3, 3], [2, 2], [0, 0], [1, 1], True),
        ],
    )
    def test_maxima(self, arguments: tuple[Any, ...]) -> None:
        """Kernel, stride, padding, dilation, ceil_mode."""
        x = random(2, 3, 8, 8)
        gradient, (expected,) = gradients(lambda x: functional.max_pool2d(x, *arguments), x)
        indices = functional.max_pool2d(x, *arguments, return_indices=True)[1]
        torch.testing.assert_close(max_pool2d_backward(gradient, x, *arguments, indices), expected)

    @pytest.mark.parametrize(
        "arguments",
        [
            ([2, 2], [2, 2], [0, 0], True, None),
            ([3, 2], [1, 2], [1, 0], True, None),
            ([3, 3], [2, 2], [0, 0], False, None),
            ([3, 3], [2, 1], [1, 1], True, 4),
            ([2, 2], [], [0, 0], True, None),  # no stride is that of the kernel
        ],
    )
    def test_averages(self, arguments: tuple[Any, ...]) -> None:
        x = random(2, 3, 8, 9)
        kernel, stride, padding, counted, divisor = arguments
        gradient, (expected,) = gradients(
            lambda x: functional.avg_pool2d(x, kernel, stride or None, padding, False, counted, divisor), x
        )
        found = avg_pool2d_backward(gradient, x, kernel, stride, padding, False, counted, divisor)
        torch.testing.assert_close(found, expected)

    @pytest.mark.parametrize(("ceil_mode", "padding", "counted"), [(True, [0, 0], True), (False, [1, 0], False)])
    def test_averages_of_windows_of_several_sizes_are_left_to_others(
        self, ceil_mode: bool, padding: list[int], counted: bool
    ) -> None:
        x = random(1, 1, 4, 4)
        found = avg_pool2d_backward(x, x, [2, 2], [2, 2], padding, ceil_mode, counted, None)
        assert found is NotImplemented


def test_memory_is_filled_with_zeros() -> None:
    found = empty_permuted([2, 3], [1, 0], dtype=torch.float16, device="cpu")
    assert found.dtype == torch.float16
    assert found.tolist() == [[0, 0, 0], [0, 0, 0]]


@pytest.mark.parametrize(
    "operator",
    [
        aten.convolution_backward.default,
        aten.max_pool2d_with_indices_backward.default,
        aten.avg_pool2d_backward.default,
        aten.native_layer_norm_backward.default,
        aten.native_group_norm_backward.default,
        aten.gelu_backward.default,
        aten._softmax_backward_data.default,
        aten.threshold_backward.default,
        aten.hardswish_backward.default,
        aten.slice_backward.default,
    ],
)
def test_the_table_knows_what_onnx_lacks(operator: Any) -> None:
    assert operator in backward_decompositions()
