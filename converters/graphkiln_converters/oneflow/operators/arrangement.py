"""Shapes, slices, concatenation, gathering, constants, resampling and padding."""

from __future__ import annotations

import math

import numpy as np

from graphkiln_backend.graph.dtypes import DType
from graphkiln_converters.oneflow.building import TRANSLATORS, Op, Value, check_channels_first, translates

_END = np.iinfo(np.int64).max


# Operations that are one node in ONNX.
TRANSLATORS |= {
    **dict.fromkeys(
        ("reshape", "squeeze", "expand_dims"), lambda op: op.emit("Reshape", op.x, op.constant(op.result_shape))
    ),
    "transpose": lambda op: op.emit("Transpose", op.x, perm=op.integers("perm")),
    **dict.fromkeys(("expand", "broadcast_like"), lambda op: op.emit("Expand", op.x, op.constant(op.result_shape))),
    "concat": lambda op: op.emit("Concat", *op.inputs, axis=op.axis()),
    "gather": lambda op: op.emit("Gather", op.x, op.inputs[1], axis=op.axis()),  # along axis 0, an embedding
    "dim_gather": lambda op: op.emit("GatherElements", op.x, op.inputs[1], axis=op.axis("dim")),
    "gather_nd": lambda op: op.emit("GatherND", op.x, op.cast(op.inputs[1], DType.INT64)),
}


@translates("stack")
def stack(op: Op) -> Value:
    """Stack tensors along a new axis."""
    axis = op.integer("axis")
    unsqueezed = [op.emit("Unsqueeze", value, op.constant([axis])) for value in op.inputs]
    return op.emit("Concat", *unsqueezed, axis=axis)


@translates("slice")
def slice_(op: Op) -> Value:
    """Slice by start, stop and step for each axis; whole axes are omitted from the node."""
    starts, stops, steps = (op.integers(name) for name in ("start", "stop", "step"))
    whole = [s == 0 and e >= n and t == 1 for s, e, t, n in zip(starts, stops, steps, op.shape, strict=True)]
    axes = [axis for axis, is_whole in enumerate(whole) if not is_whole]
    if not axes:
        return op.emit("Identity", op.x)
    chosen = ([values[axis] for axis in axes] for values in (starts, stops))
    return op.emit(
        "Slice", op.x, *map(op.constant, chosen), op.constant(axes), op.constant([steps[axis] for axis in axes])
    )


@translates("narrow")
def narrow(op: Op) -> Value:
    """Take a range of an axis."""
    start = op.integer("start")
    return _slice_axis(op, op.x, op.axis("dim"), start, start + op.integer("length"))


@translates("slice_update")
def slice_update(op: Op) -> Value:
    """Replace a part of a tensor: concatenate the parts before, inside and after it, axis by axis."""
    if any(step != 1 for step in op.integers("step")):
        raise op.error("a step other than 1 cannot be translated")
    starts, stops = op.integers("start"), op.integers("stop")
    axes = [axis for axis, size in enumerate(op.shape) if (starts[axis], stops[axis]) != (0, size)]
    outer = [op.x]  # for each axis, the part of the tensor that is replaced along it
    for axis in axes:
        outer.append(_slice_axis(op, outer[-1], axis, starts[axis], stops[axis]))
    y = op.inputs[1]
    for axis, part in reversed(list(zip(axes, outer, strict=False))):
        before = [_slice_axis(op, part, axis, 0, starts[axis])] if starts[axis] else []
        after = [_slice_axis(op, part, axis, stops[axis], _END)] if stops[axis] < op.shape[axis] else []
        y = op.emit("Concat", *before, y, *after, axis=axis)
    return op.emit("Identity", y) if y is op.inputs[1] else y


@translates("roll")
def roll(op: Op) -> Value:
    """Shift elements along axes; elements that pass the end come in at the start."""
    shifts, axes = op.integers("shifts"), op.integers("dims", [])
    if axes == [-1] and op.rank > 1:
        raise op.error("rolling over all dimensions at once (dims is not given) cannot be translated")
    y = op.x
    for shift, axis in zip(shifts, (axis % op.rank for axis in axes), strict=True):
        cut = -shift % op.shape[axis]
        if cut:
            y = op.emit("Concat", _slice_axis(op, y, axis, cut, _END), _slice_axis(op, y, axis, 0, cut), axis=axis)
    return op.emit("Identity", y) if y is op.x else y


@translates("flip")
def flip(op: Op) -> Value:
    """Reverse axes."""
    axes = [axis % op.rank for axis in op.integers("dims")]
    lists = ([-1] * len(axes), [-_END] * len(axes), axes, [-1] * len(axes))
    return op.emit("Slice", op.x, *map(op.constant, lists))


@translates("tril", "triu")
def triangle(op: Op) -> Value:
    """Keep the lower or upper triangle of the last two axes, and fill the rest, with 0 by default."""
    lower = op.operation.kind == "tril"
    rows, columns = op.shape[-2:]
    ones = np.ones((rows, columns), bool)
    kept = np.tril(ones, op.integer("diagonal")) if lower else np.triu(ones, op.integer("diagonal"))
    floating = op.flag("is_floating_fill_value", False)
    fill = op.number("floating_fill_value", 0.0) if floating else op.integer("integer_fill_value", 0)
    return op.emit("Where", op.constant(kept, DType.BOOL), op.x, op.scalar(fill))


@translates("constant")
def constant(op: Op) -> Value:
    """Fill a tensor with a number."""
    number = op.number("floating_value") if op.flag("is_floating_value") else op.integer("integer_value")
    return op.emit("Expand", op.constant(number, op.result_dtype), op.constant(op.result_shape))


@translates("arange")
def arange(op: Op) -> Value:
    """Make evenly spaced numbers."""
    dtype = op.result_dtype
    prefix = "float" if dtype.is_float else "integer"
    start, delta = op.number(f"{prefix}_start"), op.number(f"{prefix}_delta")
    (count,) = op.result_shape
    return op.constant(np.asarray(start + delta * np.arange(count), dtype.numpy), dtype)


@translates("eye")
def eye(op: Op) -> Value:
    """Make a matrix with 1 on the diagonal and 0 elsewhere."""
    rows, columns = op.result_shape
    return op.constant(np.eye(rows, columns), op.result_dtype)


@translates("one_hot")
def one_hot(op: Op) -> Value:
    """Encode indices along a new last axis: one value at the index, another elsewhere."""
    dtype = op.result_dtype
    prefix = "floating" if dtype.is_float else "integer"
    values = op.constant([op.number(f"{prefix}_off_value"), op.number(f"{prefix}_on_value")], dtype)
    return op.emit("OneHot", op.x, op.constant(op.integer("depth")), values, axis=-1)


def _slice_axis(op: Op, value: Value, axis: int, start: int, stop: int) -> Value:
    return op.emit("Slice", value, *(op.constant([number]) for number in (start, stop, axis)))


# Resampling and padding.

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
    """Resample by a scale; the cubic coefficient is -0.75, as in PyTorch."""
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
    """Scales that OneFlow computes with, if they give the size of its result; else that size."""
    sizes, targets = op.shape[2:], op.result_shape[2:]
    names = [f"{name}_scale" if name else "scale_factor" for name in _AXES[len(sizes)]]
    scales = [op.number(name) for name in names]
    scaled = tuple(math.floor(size * scale) for size, scale in zip(sizes, scales, strict=True))
    if scaled == targets:
        return (op.constant(scales, DType.FP32),)
    return None, op.constant(targets)


@translates("pad")
def pad(op: Op) -> Value:
    """Pad with a constant; negative widths crop."""
    widths = op.constant([*op.integers("padding_before"), *op.integers("padding_after")])
    number = op.number("floating_constant_value") if op.dtype.is_float else op.integer("integral_constant_value")
    return op.emit("Pad", op.x, widths, op.scalar(number), mode="constant")


@translates("reflection_pad1d", "reflection_pad2d")
def reflection_pad(op: Op) -> Value:
    """Pad with the input mirrored at its borders."""
    return op.emit("Pad", op.x, op.constant(_pads(op)), mode="reflect")


@translates("replication_pad1d", "replication_pad2d")
def replication_pad(op: Op) -> Value:
    """Pad by repeating the border."""
    return op.emit("Pad", op.x, op.constant(_pads(op)), mode="edge")


def _pads(op: Op) -> list[int]:
    """Convert `padding` (last axis first: before, after) to ONNX's order: before each axis, then after each."""
    pairs = op.integers("padding")
    before, after = pairs[0::2][::-1], pairs[1::2][::-1]
    rest = [0] * (op.rank - len(before))
    return [*rest, *before, *rest, *after]


@translates("grid_sample")
def grid_sample(op: Op) -> Value:
    """Sample the input at coordinates."""
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
    """Make coordinates for `grid_sample`: each pixel, transformed by affine matrices `[batch, 2, 3]`."""
    height, width = op.integers("size")[2:]
    aligned = op.flag("align_corners")
    x, y = np.meshgrid(_centers(width, aligned), _centers(height, aligned))
    points = np.stack([x, y, np.ones_like(x)], axis=-1).reshape(height * width, 3)
    mapped = op.emit("MatMul", op.constant(points, op.dtype), op.emit("Transpose", op.x, perm=[0, 2, 1]))
    return op.emit("Reshape", mapped, op.constant(op.result_shape))


def _centers(size: int, aligned: bool) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """Coordinates of pixel centers from -1 to 1; the outer ones are at the ends if aligned, else half a pixel in."""
    ends = np.linspace(-1, 1, size)
    return ends if aligned else ends * (size - 1) / size
