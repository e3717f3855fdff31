"""Convolutions, their windows as columns, and pooling."""

from __future__ import annotations

import math

import numpy as np

from graphkiln_converters.oneflow.building import Op, Value, align_to_axis, check_channels_first, translates


@translates("conv1d", "conv2d", "conv3d")
def convolution(op: Op) -> Value:
    """Convolve with a weight `[filters, channels / groups, ...]`; the padding is the same on both sides."""
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
    """Apply a transposed convolution with a weight `[channels, filters / groups, ...]`."""
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
    """Add a bias along an axis."""
    return op.emit("Add", op.x, align_to_axis(op, op.inputs[1], op.axis()))


@translates("unfold")
def unfold(op: Op) -> Value:
    """Make columns `[batch, channels * window, positions]` of windows: a convolution with one-hot kernels."""
    check_channels_first(op)
    channels = op.shape[1]
    columns = op.emit("Conv", op.x, _one_hot_kernels(op, channels), group=channels, **_windows(op))
    return op.emit("Reshape", columns, op.constant(op.result_shape))


@translates("fold")
def fold(op: Op) -> Value:
    """Invert `unfold`, and sum overlapping windows: a transposed convolution with one-hot kernels."""
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
    """Make a weight `[channels * window, 1, *kernel]` of kernels with a single 1 each."""
    kernel = op.integers("kernel_size")
    window = math.prod(kernel)
    weight = np.tile(np.eye(window).reshape(window, 1, *kernel), (channels, 1, *[1] * len(kernel)))
    return op.constant(weight, op.dtype)


# Pooling over windows of a fixed size, or down to a fixed size.


@translates("max_pool_1d", "max_pool_2d", "max_pool_3d")
def max_pool(op: Op) -> tuple[Value, ...]:
    """Find the maximum of each window, and with `return_indices` its index in the channel."""
    check_channels_first(op)
    count = 2 if op.flag("return_indices", False) else 1
    outputs = op.emit_multiple(
        "MaxPool", count, op.x, dilations=op.integers("dilation"), **_windows_of_pooling(op), ceil_mode=_ceil(op)
    )
    if count == 1:
        return (outputs[0],)
    return outputs[0], _index_in_channel(op, outputs[1])


def _index_in_channel(op: Op, index: Value) -> Value:
    """Convert ONNX's index in the whole batch to OneFlow's index in one channel of one sample."""
    return op.emit("Mod", index, op.constant(math.prod(op.shape[2:])))


@translates("avg_pool_1d", "avg_pool_2d", "avg_pool_3d")
def avg_pool(op: Op) -> Value:
    """Average each window; with `divisor_override`, divide its sum by that."""
    check_channels_first(op)
    padded, divisor = op.flag("count_include_pad", True), op.integer("divisor_override", 0)
    y = op.emit(
        "AveragePool",
        op.x,
        **_windows_of_pooling(op),
        ceil_mode=_ceil(op),
        count_include_pad=int(padded or divisor != 0),
    )
    if not divisor:
        return y
    if _ceil(op):
        raise op.error("divisor_override together with ceil_mode cannot be translated")
    return op.emit("Mul", y, op.scalar(math.prod(op.integers("kernel_size")) / divisor))


def _windows_of_pooling(op: Op) -> dict[str, list[int]]:
    return {
        "kernel_shape": op.integers("kernel_size"),
        "strides": op.integers("stride"),
        "pads": op.integers("padding") * 2,
    }


def _ceil(op: Op) -> int:
    return int(op.flag("ceil_mode", False))


@translates("adaptive_avg_pool1d", "adaptive_avg_pool2d", "adaptive_avg_pool3d")
def adaptive_avg_pool(op: Op) -> Value:
    """Average windows that cover the input; if they differ in size, by a product with averaging weights."""
    sizes, targets = op.shape[2:], op.result_shape[2:]
    if all(target == 1 for target in targets):
        return op.emit("GlobalAveragePool", op.x)
    if sizes == targets:
        return op.emit("Identity", op.x)
    if all(size % target == 0 for size, target in zip(sizes, targets, strict=True)):
        window = [size // target for size, target in zip(sizes, targets, strict=True)]
        return op.emit("AveragePool", op.x, kernel_shape=window, strides=window)
    y = op.x
    for axis, (size, target) in enumerate(zip(sizes, targets, strict=True), start=2):
        to_last = [*(other for other in range(op.rank) if other != axis), axis]
        from_last = [to_last.index(other) for other in range(op.rank)]
        weights = op.constant(_averaging_weights(size, target), op.dtype)
        y = op.emit("MatMul", op.emit("Transpose", y, perm=to_last), weights)
        y = op.emit("Transpose", y, perm=from_last)
    return y


@translates("adaptive_max_pool1d", "adaptive_max_pool2d", "adaptive_max_pool3d")
def adaptive_max_pool(op: Op) -> tuple[Value, Value]:
    """Find the maximum of windows of one size that cover the input, and its index in the channel."""
    sizes, targets = op.shape[2:], op.result_shape[2:]
    if any(size % target for size, target in zip(sizes, targets, strict=True)):
        raise op.error(f"{list(sizes)} cannot be divided into {list(targets)} windows of one size")
    window = [size // target for size, target in zip(sizes, targets, strict=True)]
    y, index = op.emit_multiple("MaxPool", 2, op.x, kernel_shape=window, strides=window)
    return y, _index_in_channel(op, index)


def _averaging_weights(size: int, target: int) -> np.ndarray[tuple[int, int], np.dtype[np.float64]]:
    """Weights `[size, target]`: window i reaches from floor(i * size / target) to ceil((i + 1) * size / target)."""
    weights = np.zeros((size, target))
    for index in range(target):
        start, stop = index * size // target, -((index + 1) * size // -target)
        weights[start:stop, index] = 1 / (stop - start)
    return weights
