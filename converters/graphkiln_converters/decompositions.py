"""Backward operators that ONNX lacks, in terms of operators that it has.

The table goes to `ExportedProgram.run_decompositions`. PyTorch brings most of the decompositions; the ones written here
are those that it lacks or that run slowly as it writes them.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch._decomp import get_decompositions

_aten = torch.ops.aten


def backward_decompositions() -> dict[Any, Any]:
    """Operator -> its decomposition."""
    table: dict[Any, Any] = dict(
        get_decompositions(
            [
                _aten.threshold_backward,
                _aten.native_layer_norm_backward,
                _aten.native_group_norm_backward,
                _aten.gelu_backward,
                _aten._softmax_backward_data,  # noqa: SLF001 - the operator's name
                _aten._log_softmax_backward_data,  # noqa: SLF001
                _aten.silu_backward,
                _aten.hardswish_backward,
                _aten.hardsigmoid_backward,
                _aten.sigmoid_backward,
                _aten.tanh_backward,
                _aten.elu_backward,
                _aten.leaky_relu_backward,
                _aten.hardtanh_backward,
                _aten.select_backward,
                _aten.slice_backward,
            ]
        )
    )
    table[_aten.convolution_backward.default] = convolution_backward
    table[_aten.empty_permuted.default] = empty_permuted
    table[_aten.avg_pool2d_backward.default] = avg_pool2d_backward
    table[_aten.max_pool2d_with_indices_backward.default] = max_pool2d_backward
    return table


def empty_permuted(size: Any, _layout: Any, **options: Any) -> Any:
    """Uninitialized memory as zeros: it is written before it is read."""
    return torch.zeros(size, dtype=options.get("dtype"))


@dataclass(frozen=True, slots=True)
class _Convolution:
    """The geometry of a convolution.

    Attributes:
        stride: One number for each spatial axis, as all lists here.
        padding: On both sides.
        dilation: Distance between the kernel's elements.
        groups: Groups of channels.
    """

    stride: list[int]
    padding: list[int]
    dilation: list[int]
    groups: int

    @property
    def axes(self) -> range:
        """The spatial axes, from 0."""
        return range(len(self.stride))

    def apply(self, features: Any, weight: Any) -> Any:
        """The convolution itself, without a bias."""
        return self._convolution(features, weight, output_padding=None)

    def transpose(self, features: Any, weight: Any, output_padding: list[int]) -> Any:
        """The transposed convolution, without a bias."""
        return self._convolution(features, weight, output_padding)

    def _convolution(self, features: Any, weight: Any, output_padding: list[int] | None) -> Any:
        transposed, rest = output_padding is not None, output_padding or [0] * len(self.stride)
        return _aten.convolution(
            features, weight, None, self.stride, self.padding, self.dilation, transposed, rest, self.groups
        )


def convolution_backward(gradient: Any, features: Any, weight: Any, *arguments: Any) -> tuple[Any, Any, Any]:
    """The gradients of a convolution by its input, its weight and its bias.

    Args:
        gradient: Of the output, `[batch, out, *size]`.
        features: The input, `[batch, in, *size]`.
        weight: `[out, in / groups, *kernel]`; of a transposed convolution `[in, out / groups, *kernel]`.
        *arguments: The operator's others: bias_sizes, stride, padding, dilation, transposed, output_padding, groups and
            output_mask, which says which of the three gradients are needed; the others are None.
    """
    _bias_sizes, stride, padding, dilation, transposed, _output_padding, groups, output_mask = arguments
    convolution = _Convolution(stride, padding, dilation, groups)
    by_input = by_weight = by_bias = None
    if output_mask[0]:
        by_input = (
            convolution.apply(gradient, weight) if transposed else _by_input(gradient, features, weight, convolution)
        )
    if output_mask[1]:
        written, read = (features, gradient) if transposed else (gradient, features)
        by_weight = _by_weight(written, read, weight.shape, convolution)
    if output_mask[2]:
        by_bias = gradient.sum([0, *range(2, gradient.dim())])
    return by_input, by_weight, by_bias


def _by_input(gradient: Any, features: Any, weight: Any, convolution: _Convolution) -> Any:
    """The transposed convolution with the same weight.

    With strides of one that is a plain convolution with the flipped weight, which runtimes do far better.

    Source: Dumoulin and Visin, "A guide to convolution arithmetic for deep learning", chapter 4.
    """
    stride, padding, axes = convolution.stride, convolution.padding, convolution.axes
    reach = [convolution.dilation[i] * (weight.shape[2 + i] - 1) for i in axes]
    if all(step == 1 for step in stride) and all(reach[i] >= padding[i] for i in axes):
        grouped = weight.reshape(convolution.groups, -1, *weight.shape[1:]).transpose(1, 2)
        flipped = grouped.reshape(-1, *grouped.shape[2:]).flip(list(range(2, weight.dim())))
        around = [reach[i] - padding[i] for i in axes]
        return _Convolution(stride, around, convolution.dilation, convolution.groups).apply(gradient, flipped)
    covered = [(gradient.shape[2 + i] - 1) * stride[i] - 2 * padding[i] + reach[i] + 1 for i in axes]
    return convolution.transpose(gradient, weight, [features.shape[2 + i] - covered[i] for i in axes])


def _by_weight(written: Any, read: Any, shape: Any, convolution: _Convolution) -> Any:
    """For each position in the kernel a matrix product: of the outputs with the inputs that it was applied to.

    Args:
        written: What the kernel writes to (reads, in a transposed convolution), `[batch, out, *size]`.
        read: The other side, `[batch, in, *size]`.
        shape: Of the weight, `[out, in / groups, *kernel]`.
        convolution: Its geometry.
    """
    stride, padding, axes, kernel = convolution.stride, convolution.padding, convolution.axes, shape[2:]
    if any(padding):
        read = nn.functional.pad(read, [pad for i in reversed(axes) for pad in (padding[i], padding[i])])
    left = written.reshape(written.shape[0], convolution.groups, shape[0] // convolution.groups, -1)
    products = []
    for position in itertools.product(*map(range, kernel)):
        window = read
        for i in axes:
            if kernel[i] > 1 or stride[i] > 1:
                begin = position[i] * convolution.dilation[i]
                end = begin + (written.shape[2 + i] - 1) * stride[i] + 1
                window = _aten.slice(window, 2 + i, begin, end, stride[i])
        right = window.reshape(read.shape[0], convolution.groups, shape[1], -1)
        product = left @ right.transpose(2, 3)
        summed = product.squeeze(0) if written.shape[0] == 1 else product.sum(0)
        products.append(summed.reshape(shape[0], shape[1]))
    return (products[0] if len(products) == 1 else torch.stack(products, dim=-1)).reshape(shape)


def max_pool2d_backward(gradient: Any, features: Any, *arguments: Any) -> Any:
    """Each maximum passes its gradient on to the element that it was.

    Args:
        gradient: Of the output, `[batch, channels, *size]`.
        features: The input, `[batch, channels, *size]`.
        *arguments: The operator's others; the last one are the indices of the maxima in their channel.
    """
    indices = arguments[-1]
    batch, channels = features.shape[0], features.shape[1]
    flat = torch.zeros_like(features).reshape(batch, channels, -1)
    scattered = flat.scatter_add(2, indices.reshape(batch, channels, -1), gradient.reshape(batch, channels, -1))
    return scattered.reshape(features.shape)


def avg_pool2d_backward(gradient: Any, features: Any, *arguments: Any) -> Any:
    """Each average passes equal shares of its gradient on: a transposed convolution for each channel.

    Args:
        gradient: Of the output, `[batch, channels, *size]`.
        features: The input, `[batch, channels, *size]`.
        *arguments: The operator's others: kernel_size, stride, padding, ceil_mode, count_include_pad and
            divisor_override.

    Returns:
        NotImplemented where the windows are of different sizes.
    """
    kernel, stride, padding, ceil_mode, count_include_pad, divisor_override = arguments
    if ceil_mode or (any(padding) and not count_include_pad):
        return NotImplemented
    channels = features.shape[1]
    share = 1.0 / (divisor_override or kernel[0] * kernel[1])
    weight = torch.full((channels, 1, *kernel), share, dtype=gradient.dtype)
    convolution = (None, stride or kernel, padding, [1, 1], False, [0, 0], channels, [True, False, False])
    return convolution_backward(gradient, features, weight, *convolution)[0]
