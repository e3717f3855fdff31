"""Normalizations in inference mode."""

from __future__ import annotations

import numpy as np

from graphkiln_converters.oneflow.building import Op, Value
from graphkiln_converters.oneflow.layout import align_to_axis, check_channels_first
from graphkiln_converters.oneflow.translator import translates


@translates("normalization", "normalization_infer")
def batch_norm(op: Op) -> Value:
    """By the running statistics. In a graph that was saved in training mode it uses those of the batch: rejected."""
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
    """Over the dimensions from `begin_norm_axis` on; used on GPUs (a CPU's is saved as its single operations)."""
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
    """Over the channels of a group and all positions; used on GPUs (a CPU's is saved as its single operations)."""
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
    """`x / sqrt(max(sum(x * x), epsilon))` along an axis, and that sum."""
    axis = op.constant([op.axis()])
    squares = op.emit("ReduceSumSquare", op.x, axis, keepdims=1)
    norm = op.emit("Sqrt", op.emit("Max", squares, op.scalar(op.number("epsilon"))))
    return op.emit("Div", op.x, norm), squares
