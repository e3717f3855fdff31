"""Reductions, sorting, and cumulative sums."""

from __future__ import annotations

import math

from graphkiln_backend.graph.dtypes import DType
from graphkiln_converters.oneflow.building import Op, Value
from graphkiln_converters.oneflow.translator import translates

_REDUCTIONS = {
    "reduce_sum": "ReduceSum",
    "reduce_max": "ReduceMax",
    "reduce_min": "ReduceMin",
    "reduce_prod": "ReduceProd",
}


@translates(*_REDUCTIONS)
def reduction(op: Op) -> Value:
    """Over some axes."""
    axes = op.constant(_axes(op, "axis"))
    return op.emit(_REDUCTIONS[op.operation.kind], op.x, axes, keepdims=int(op.flag("keepdims", False)))


@translates("reduce_any", "reduce_all")
def any_or_all(op: Op) -> Value:
    """Whether any element is true, or all are."""
    kind = "ReduceMax" if op.operation.kind == "reduce_any" else "ReduceMin"
    numbers = op.cast(op.cast(op.x, DType.BOOL), DType.INT32)
    reduced = op.emit(kind, numbers, op.constant(_axes(op, "axis")), keepdims=int(op.flag("keepdims", False)))
    return op.cast(reduced, DType.BOOL)


@translates("var")
def variance(op: Op) -> Value:
    """The mean of squared deviations; `unbiased` divides by one less than their number."""
    axes = _axes(op, "dim")
    count, keepdims = math.prod(op.shape[axis] for axis in axes), int(op.flag("keepdim", False))
    centered = op.emit("Sub", op.x, op.emit("ReduceMean", op.x, op.constant(axes), keepdims=1))
    y = op.emit("ReduceMean", op.emit("Mul", centered, centered), op.constant(axes), keepdims=keepdims)
    return op.emit("Mul", y, op.scalar(count / (count - 1))) if op.flag("unbiased") and count > 1 else y


@translates("argmax")
def argmax(op: Op) -> Value:
    """Index of the maximum along the last axis, the first of equal ones."""
    return op.emit("ArgMax", op.x, axis=-1, keepdims=0)


@translates("top_k")
def top_k(op: Op) -> Value:
    """Indices of the k largest elements along the last axis."""
    return op.emit_multiple("TopK", 2, op.x, op.constant([op.integer("k")]), axis=-1)[1]


@translates("arg_sort")
def arg_sort(op: Op) -> Value:
    """Indices that sort the elements along the last axis."""
    largest = int(op.text("direction") == "DESCENDING")
    _, order = op.emit_multiple("TopK", 2, op.x, op.constant([op.shape[-1]]), axis=-1, largest=largest)
    return op.cast(order, op.result_dtype)


@translates("cumsum")
def cumsum(op: Op) -> Value:
    """Cumulative sum along an axis."""
    return op.emit("CumSum", op.x, op.constant(op.axis("dim")))


def _axes(op: Op, name: str) -> list[int]:
    """Axes counted from the back, whatever dimensions stand in front; all of them where none is given."""
    return [axis - op.rank for axis in sorted(axis % op.rank for axis in op.integers(name)) or range(op.rank)]
