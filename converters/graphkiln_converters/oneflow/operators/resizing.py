"""Resampling and padding."""

from __future__ import annotations

import math

import numpy as np

from graphkiln_backend.graph.dtypes import DType
from graphkiln_converters.oneflow.building import Op, Value
from graphkiln_converters.oneflow.layout import check_channels_first
from graphkiln_converters.oneflow.translator import translates

_AXES = {1: ("",), 2: ("height", "width"), 3: ("depth", "height", "width")}
_MODES = {"linear": "linear", "bilinear": "linear", "trilinear": "linear", "bicubic": "cubic", "nearest": "nearest"}
_SAMPLING_MODES = {"bilinear", "nearest", "bicubic"}


@translates(
    "upsample_nearest_1d",
    "upsample_nearest_2d",
    "upsample_nearest_3d",
    "upsample_linear_1d",
    "upsample_bilinear_2d",
    "upsample_bicubic_2d",
    "upsample_trilinear_3d",
)
def upsample(op: Op) -> Value:
    """Resampled by a scale; the cubic coefficient is -0.75, as in PyTorch."""
    check_channels_first(op)
    mode = _MODES[op.operation.kind.split("_")[1]]
    if mode == "nearest":
        coordinates = {"coordinate_transformation_mode": "asymmetric", "nearest_mode": "floor"}
    else:
        aligned = op.flag("align_corners")
        coordinates = {"coordinate_transformation_mode": "align_corners" if aligned else "half_pixel"}
    axes = list(range(2, op.rank))
    return op.emit(
        "Resize", op.x, None, *_scales_or_sizes(op), mode=mode, cubic_coeff_a=-0.75, axes=axes, **coordinates
    )


def _scales_or_sizes(op: Op) -> tuple[Value | None, ...]:
    """The scales that OneFlow computes with where they give the size of its result; else that size."""
    sizes, targets = op.shape[2:], op.result_shape[2:]
    names = [f"{name}_scale" if name else "scale_factor" for name in _AXES[len(sizes)]]
    scales = [op.number(name) for name in names]
    scaled = tuple(math.floor(size * scale) for size, scale in zip(sizes, scales, strict=True))
    if scaled == targets:
        return (op.constant(scales, DType.FP32),)
    return None, op.constant(targets)


@translates("pad")
def pad(op: Op) -> Value:
    """Padding with a constant; negative widths crop."""
    widths = op.constant([*op.integers("padding_before"), *op.integers("padding_after")])
    number = op.number("floating_constant_value") if op.dtype.is_float else op.integer("integral_constant_value")
    return op.emit("Pad", op.x, widths, op.scalar(number), mode="constant")


@translates("reflection_pad1d", "reflection_pad2d")
def reflection_pad(op: Op) -> Value:
    """Padding with the input mirrored at its borders."""
    return op.emit("Pad", op.x, op.constant(_pads(op)), mode="reflect")


@translates("replication_pad1d", "replication_pad2d")
def replication_pad(op: Op) -> Value:
    """Padding with the border repeated."""
    return op.emit("Pad", op.x, op.constant(_pads(op)), mode="edge")


def _pads(op: Op) -> list[int]:
    """`padding` (last axis first: before, after) in ONNX's order: before each axis, then after each."""
    pairs = op.integers("padding")
    before, after = pairs[0::2][::-1], pairs[1::2][::-1]
    rest = [0] * (op.rank - len(before))
    return [*rest, *before, *rest, *after]


@translates("grid_sample")
def grid_sample(op: Op) -> Value:
    """Samples of the input at coordinates."""
    mode = op.text("interpolation_mode")
    if mode not in _SAMPLING_MODES:
        raise op.error(f"interpolation_mode '{mode}' cannot be translated")
    return op.emit(
        "GridSample",
        *op.inputs,
        mode=mode,
        padding_mode=op.text("padding_mode"),
        align_corners=int(op.flag("align_corners")),
    )


@translates("affine_grid")
def affine_grid(op: Op) -> Value:
    """Coordinates for `grid_sample`: each pixel, transformed by affine matrices `[batch, 2, 3]`."""
    height, width = op.integers("size")[2:]
    aligned = op.flag("align_corners")
    x, y = np.meshgrid(_centers(width, aligned), _centers(height, aligned))
    points = np.stack([x, y, np.ones_like(x)], axis=-1).reshape(height * width, 3)
    mapped = op.emit("MatMul", op.constant(points, op.dtype), op.emit("Transpose", op.x, perm=[0, 2, 1]))
    return op.emit("Reshape", mapped, op.constant(op.result_shape))


def _centers(size: int, aligned: bool) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """Coordinates of pixel centers from -1 to 1: of the outer ones at both ends, or half a pixel inside."""
    ends = np.linspace(-1, 1, size)
    return ends if aligned else ends * (size - 1) / size
