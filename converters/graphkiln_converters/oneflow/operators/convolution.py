"""Convolutions, plain and transposed, and operations on their windows."""

from __future__ import annotations

import math

import numpy as np

from graphkiln_converters.oneflow.building import Op, Value
from graphkiln_converters.oneflow.layout import align_to_axis, check_channels_first
from graphkiln_converters.oneflow.translator import translates


@translates("conv1d", "conv2d", "conv3d")
def convolution(op: Op) -> Value:
    """The weight is `[filters, channels / groups, ...]`; the padding is the same on both sides."""
    check_channels_first(op)
    inputs, weight, bias, addend = (*op.operand_segments(), [], [])[:4]
    y = op.emit(
        "Conv",
        *inputs,
        *weight,
        *bias,
        strides=op.integers("strides"),
        dilations=op.integers("dilation_rate"),
        pads=op.integers("padding_before") * 2,
        group=op.integer("groups", 1),
        kernel_shape=op.integers("kernel_size"),
    )
    return op.emit("Add", y, *addend) if addend else y


@translates("deconv1d", "deconv2d", "deconv3d")
def transposed_convolution(op: Op) -> Value:
    """The weight is `[channels, filters / groups, ...]`."""
    check_channels_first(op)
    return op.emit(
        "ConvTranspose",
        *op.inputs,
        strides=op.integers("strides"),
        dilations=op.integers("dilation_rate"),
        pads=op.integers("padding_before") * 2,
        output_padding=op.integers("output_padding"),
        group=op.integer("groups", 1),
        kernel_shape=op.integers("kernel_size"),
    )


@translates("bias_add")
def bias_add(op: Op) -> Value:
    """Adds a bias along an axis."""
    return op.emit("Add", op.x, align_to_axis(op, op.inputs[1], op.axis()))


@translates("unfold")
def unfold(op: Op) -> Value:
    """Windows as columns `[batch, channels * window, positions]`: a convolution with one-hot kernels."""
    check_channels_first(op)
    channels = op.shape[1]
    columns = op.emit("Conv", op.x, _one_hot_kernels(op, channels), group=channels, **_windows(op))
    return op.emit("Reshape", columns, op.constant(op.result_shape))


@translates("fold")
def fold(op: Op) -> Value:
    """The reverse, which sums where windows overlap: a transposed convolution with one-hot kernels."""
    check_channels_first(op)
    batch, rows, _ = op.shape
    kernel, size = op.integers("kernel_size"), op.integers("output_size")
    channels = rows // math.prod(kernel)
    windows = _windows(op)
    padding, strides, dilations = op.integers("padding"), op.integers("strides"), op.integers("dilation_rate")
    reach = [(k - 1) * d + 1 for k, d in zip(kernel, dilations, strict=True)]
    positions = [(n + 2 * p - r) // s + 1 for n, p, r, s in zip(size, padding, reach, strides, strict=True)]
    remainder = [
        n + 2 * p - r - (c - 1) * s for n, p, r, c, s in zip(size, padding, reach, positions, strides, strict=True)
    ]
    columns = op.emit("Reshape", op.x, op.constant([batch, rows, *positions]))
    return op.emit(
        "ConvTranspose", columns, _one_hot_kernels(op, channels), group=channels, output_padding=remainder, **windows
    )


def _windows(op: Op) -> dict[str, list[int]]:
    return {
        "kernel_shape": op.integers("kernel_size"),
        "strides": op.integers("strides"),
        "dilations": op.integers("dilation_rate"),
        "pads": op.integers("padding") * 2,
    }


def _one_hot_kernels(op: Op, channels: int) -> Value:
    """A weight `[channels * window, 1, *kernel]` whose kernels have a single 1 each."""
    kernel = op.integers("kernel_size")
    window = math.prod(kernel)
    weight = np.tile(np.eye(window).reshape(window, 1, *kernel), (channels, 1, *[1] * len(kernel)))
    return op.constant(weight, op.dtype)
