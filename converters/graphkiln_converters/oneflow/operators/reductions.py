"""Reductions, sorting, cumulative sums, matrix products and normalizations."""

from __future__ import annotations

import math

import numpy as np

from graphkiln_backend.graph.dtypes import DType
from graphkiln_converters.oneflow.building import Op, Value, align_to_axis, check_channels_first, translates

_REDUCTIONS = {
    "reduce_sum": "ReduceSum",
    "reduce_max": "ReduceMax",
    "reduce_min": "ReduceMin",
    "reduce_prod": "ReduceProd",
}


@translates(*_REDUCTIONS)
def reduction(op: Op) -> Value:
    """Reduce some axes."""
    axes = op.constant(_axes(op, "axis"))
    return op.emit(_REDUCTIONS[op.operation.kind], op.x, axes, keepdims=int(op.flag("keepdims", False)))


@translates("reduce_any", "reduce_all")
def any_or_all(op: Op) -> Value:
    """Test whether any element is true, or all are."""
    kind = "ReduceMax" if op.operation.kind == "reduce_any" else "ReduceMin"
    numbers = op.cast(op.cast(op.x, DType.BOOL), DType.INT32)
    reduced = op.emit(kind, numbers, op.constant(_axes(op, "axis")), keepdims=int(op.flag("keepdims", False)))
    return op.cast(reduced, DType.BOOL)


@translates("var")
def variance(op: Op) -> Value:
    """Compute the mean of squared deviations; `unbiased` divides by one less than their number."""
    axes = _axes(op, "dim")
    count, keepdims = math.prod(op.shape[axis] for axis in axes), int(op.flag("keepdim", False))
    centered = op.emit("Sub", op.x, op.emit("ReduceMean", op.x, op.constant(axes), keepdims=1))
    y = op.emit("ReduceMean", op.emit("Mul", centered, centered), op.constant(axes), keepdims=keepdims)
    return op.emit("Mul", y, op.scalar(count / (count - 1))) if op.flag("unbiased") and count > 1 else y


@translates("argmax")
def argmax(op: Op) -> Value:
    """Find the index of the maximum along the last axis, the first of equal ones."""
    return op.emit("ArgMax", op.x, axis=-1, keepdims=0)


@translates("top_k")
def top_k(op: Op) -> Value:
    """Find the indices of the k largest elements along the last axis."""
    return op.emit_multiple("TopK", 2, op.x, op.constant([op.integer("k")]), axis=-1)[1]


@translates("arg_sort")
def arg_sort(op: Op) -> Value:
    """Find the indices that sort the elements along the last axis."""
    largest = int(op.text("direction") == "DESCENDING")
    _, order = op.emit_multiple("TopK", 2, op.x, op.constant([op.shape[-1]]), axis=-1, largest=largest)
    return op.cast(order, op.result_dtype)


@translates("cumsum")
def cumsum(op: Op) -> Value:
    """Sum cumulatively along an axis."""
    return op.emit("CumSum", op.x, op.constant(op.axis("dim")))


def _axes(op: Op, name: str) -> list[int]:
    """Axes counted from the back, for any number of leading dimensions; all axes by default."""
    return [axis - op.rank for axis in sorted(axis % op.rank for axis in op.integers(name)) or range(op.rank)]


# Matrix products.


@translates("matmul", "batch_matmul", "broadcast_matmul")
def matmul(op: Op) -> Value:
    """Compute `alpha * a @ b (+ addend)`; a or b may be transposed first."""
    a = _transpose(op, 0) if op.flag("transpose_a", False) else op.inputs[0]
    b = _transpose(op, 1) if op.flag("transpose_b", False) else op.inputs[1]
    y = op.emit("MatMul", a, b)
    alpha = op.number("alpha", 1.0)
    if alpha != 1.0:
        y = op.emit("Mul", y, op.scalar(alpha))
    return op.emit("Add", y, op.inputs[2]) if len(op.inputs) > 2 else y


def _transpose(op: Op, index: int) -> Value:
    rank = len(op.shape_of(index))
    return op.emit("Transpose", op.inputs[index], perm=[*range(rank - 2), rank - 1, rank - 2])


# Normalizations in inference mode.


@translates("normalization", "normalization_infer")
def batch_norm(op: Op) -> Value:
    """Normalize by the running statistics; reject training mode, which uses those of the batch."""
    if op.flag("training", False):
        raise op.error("the graph was saved in training mode: call model.eval(), then trace and save it again")
    x, mean, variance, gamma, beta, addend = ((*group, None)[0] for group in (*op.operand_segments(), [], [], [])[:6])
    if mean is None or variance is None:
        raise op.error("it has no running statistics (track_running_stats=False): its outputs depend on the batch")
    axis = op.axis()
    if axis != 1:
        perm = [*range(op.rank)]
        perm[1], perm[axis] = perm[axis], perm[1]
        y = op.emit("Transpose", x, perm=perm)
        y = _normalize(op, y, (gamma, beta, mean, variance))
        y = op.emit("Transpose", y, perm=perm)
    else:
        y = _normalize(op, x, (gamma, beta, mean, variance))
    return op.emit("Add", y, addend) if addend is not None else y


def _normalize(op: Op, x: Value | None, parameters: tuple[Value | None, ...]) -> Value:
    return op.emit("BatchNormalization", x, *parameters, epsilon=op.number("epsilon"))


@translates("layer_norm")
def layer_norm(op: Op) -> Value:
    """Normalize the dimensions from `begin_norm_axis` on; saved on GPUs (on CPUs as its single operations)."""
    axis = op.integer("begin_norm_axis") % op.rank
    if op.integer("begin_params_axis", -1) % op.rank != axis:
        raise op.error("begin_params_axis is not begin_norm_axis, which ONNX cannot express")
    x, *parameters = op.inputs
    scale, center = op.flag("scale", len(parameters) > 0), op.flag("center", len(parameters) > 1)
    if len(parameters) != scale + center:
        raise op.error(f"scale is {scale}, center is {center}, but it has {len(parameters)} parameters")
    beta = parameters.pop(0) if center else None
    gamma = parameters[0] if scale else op.emit("Expand", op.scalar(1.0), op.constant(op.shape[axis:]))
    return op.emit("LayerNormalization", x, gamma, beta, axis=axis, epsilon=op.number("epsilon"))


@translates("group_norm")
def group_norm(op: Op) -> Value:
    """Normalize the channels of a group and all positions; saved on GPUs (on CPUs as its single operations)."""
    check_channels_first(op)
    if op.text("activation", "none") != "none":
        raise op.error(f"activation '{op.text('activation')}' cannot be translated")
    groups = op.integer("num_groups")
    grouped = op.emit("Reshape", op.x, op.constant([op.shape[0], groups, -1]))
    identity = (op.constant(np.full(groups, number), op.dtype) for number in (1, 0))
    y = op.emit("InstanceNormalization", grouped, *identity, epsilon=op.number("epsilon"))
    y = op.emit("Reshape", y, op.constant(op.shape))
    if not op.flag("affine", False):
        return y
    beta, gamma = op.inputs[1:]
    return op.emit("Add", op.emit("Mul", y, align_to_axis(op, gamma, 1)), align_to_axis(op, beta, 1))


@translates("l2_normalize")
def l2_normalize(op: Op) -> tuple[Value, Value]:
    """Compute `x / sqrt(max(sum(x * x), epsilon))` along an axis, and that sum."""
    axis = op.constant([op.axis()])
    squares = op.emit("ReduceSumSquare", op.x, axis, keepdims=1)
    norm = op.emit("Sqrt", op.emit("Max", squares, op.scalar(op.number("epsilon"))))
    return op.emit("Div", op.x, norm), squares
