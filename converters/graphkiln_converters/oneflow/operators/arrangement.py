"""What moves elements and leaves their values: shapes, slices, joins, and constants."""

from __future__ import annotations

import numpy as np

from graphkiln_backend.graph.dtypes import DType
from graphkiln_converters.oneflow.building import Op, Value
from graphkiln_converters.oneflow.translator import translates

_TO_THE_END = np.iinfo(np.int64).max


@translates("reshape", "squeeze", "expand_dims")
def reshape(op: Op) -> Value:
    """The same elements in order."""
    return op.emit("Reshape", op.x, op.constant(op.result_shape))


@translates("transpose")
def transpose(op: Op) -> Value:
    """Axes in another order."""
    return op.emit("Transpose", op.x, perm=op.integers("perm"))


@translates("expand", "broadcast_like")
def expand(op: Op) -> Value:
    """Axes of size 1 repeated."""
    return op.emit("Expand", op.x, op.constant(op.result_shape))


@translates("concat")
def concat(op: Op) -> Value:
    """Values one after another along an axis."""
    return op.emit("Concat", *op.inputs, axis=op.axis())


@translates("stack")
def stack(op: Op) -> Value:
    """Values one after another along a new axis."""
    axis = op.integer("axis")
    pieces = [op.emit("Unsqueeze", value, op.constant([axis])) for value in op.inputs]
    return op.emit("Concat", *pieces, axis=axis)


@translates("slice")
def slice_(op: Op) -> Value:
    """From, to, and every which, for each axis; those that are taken whole are left out."""
    starts, stops, steps = (op.integers(name) for name in ("start", "stop", "step"))
    whole = [s == 0 and e >= n and t == 1 for s, e, t, n in zip(starts, stops, steps, op.shape, strict=True)]
    axes = [axis for axis, each in enumerate(whole) if not each]
    if not axes:
        return op.emit("Identity", op.x)
    chosen = ([values[axis] for axis in axes] for values in (starts, stops))
    return op.emit(
        "Slice", op.x, *map(op.constant, chosen), op.constant(axes), op.constant([steps[axis] for axis in axes])
    )


@translates("narrow")
def narrow(op: Op) -> Value:
    """A piece of an axis."""
    start = op.integer("start")
    return _piece(op, op.x, op.axis("dim"), start, start + op.integer("length"))


@translates("slice_update")
def slice_update(op: Op) -> Value:
    """A value with another in the place of a part of it: axis by axis, what lies before, the new, what lies behind."""
    if any(step != 1 for step in op.integers("step")):
        raise op.error("a step other than 1 cannot be translated")
    starts, stops = op.integers("start"), op.integers("stop")
    axes = [axis for axis, size in enumerate(op.shape) if (starts[axis], stops[axis]) != (0, size)]
    rings = [op.x]
    for axis in axes:
        rings.append(_piece(op, rings[-1], axis, starts[axis], stops[axis]))
    y = op.inputs[1]
    for axis, ring in reversed(list(zip(axes, rings, strict=False))):
        before = [_piece(op, ring, axis, 0, starts[axis])] if starts[axis] else []
        behind = [_piece(op, ring, axis, stops[axis], _TO_THE_END)] if stops[axis] < op.shape[axis] else []
        y = op.emit("Concat", *before, y, *behind, axis=axis)
    return op.emit("Identity", y) if y is op.inputs[1] else y


@translates("roll")
def roll(op: Op) -> Value:
    """Elements that leave at one end of an axis come in at the other."""
    shifts, axes = op.integers("shifts"), op.integers("dims", [])
    if axes == [-1] and op.rank > 1:
        raise op.error("rolling over all dimensions at once (dims is not given) cannot be translated")
    y = op.x
    for shift, axis in zip(shifts, (axis % op.rank for axis in axes), strict=True):
        cut = -shift % op.shape[axis]
        if cut:
            y = op.emit("Concat", _piece(op, y, axis, cut, _TO_THE_END), _piece(op, y, axis, 0, cut), axis=axis)
    return op.emit("Identity", y) if y is op.x else y


@translates("flip")
def flip(op: Op) -> Value:
    """Axes backwards."""
    axes = [axis % op.rank for axis in op.integers("dims")]
    lists = ([-1] * len(axes), [-_TO_THE_END] * len(axes), axes, [-1] * len(axes))
    return op.emit("Slice", op.x, *map(op.constant, lists))


@translates("gather")
def gather(op: Op) -> Value:
    """Slices of an axis by their indices; an embedding is that of axis 0."""
    return op.emit("Gather", op.x, op.inputs[1], axis=op.axis())


@translates("dim_gather")
def dim_gather(op: Op) -> Value:
    """Elements along an axis, each by its own index."""
    return op.emit("GatherElements", op.x, op.inputs[1], axis=op.axis("dim"))


@translates("gather_nd")
def gather_nd(op: Op) -> Value:
    """Elements or slices by the indices of the leading axes."""
    return op.emit("GatherND", op.x, op.cast(op.inputs[1], DType.INT64))


@translates("tril", "triu")
def triangle(op: Op) -> Value:
    """The lower or upper triangle of the last two axes; the rest is a number, 0 unless said otherwise."""
    lower = op.operation.kind == "tril"
    rows, columns = op.shape[-2:]
    ones = np.ones((rows, columns), bool)
    kept = np.tril(ones, op.integer("diagonal")) if lower else np.triu(ones, op.integer("diagonal"))
    floating = op.flag("is_floating_fill_value", False)
    fill = op.number("floating_fill_value", 0.0) if floating else op.integer("integer_fill_value", 0)
    return op.emit("Where", op.constant(kept, DType.BOOL), op.x, op.scalar(fill))


@translates("constant")
def constant(op: Op) -> Value:
    """One number everywhere."""
    number = op.number("floating_value") if op.flag("is_floating_value") else op.integer("integer_value")
    return op.emit("Expand", op.constant(number, op.result_dtype), op.constant(op.result_shape))


@translates("arange")
def arange(op: Op) -> Value:
    """Numbers at equal distances."""
    dtype = op.result_dtype
    prefix = "float" if dtype.is_float else "integer"
    start, delta = op.number(f"{prefix}_start"), op.number(f"{prefix}_delta")
    (count,) = op.result_shape
    return op.constant(np.asarray(start + delta * np.arange(count), dtype.numpy), dtype)


@translates("eye")
def eye(op: Op) -> Value:
    """1 on the diagonal, 0 elsewhere."""
    rows, columns = op.result_shape
    return op.constant(np.eye(rows, columns), op.result_dtype)


@translates("one_hot")
def one_hot(op: Op) -> Value:
    """A number at the index, another elsewhere, along a new last axis."""
    dtype = op.result_dtype
    prefix = "floating" if dtype.is_float else "integer"
    values = op.constant([op.number(f"{prefix}_off_value"), op.number(f"{prefix}_on_value")], dtype)
    return op.emit("OneHot", op.x, op.constant(op.integer("depth")), values, axis=-1)


def _piece(op: Op, value: Value, axis: int, start: int, stop: int) -> Value:
    return op.emit("Slice", value, *(op.constant([number]) for number in (start, stop, axis)))
