"""Normalizations, in the form that they have when nothing is learned any more."""

from __future__ import annotations

import numpy as np

from graphkiln_converters.oneflow.building import Op, Value
from graphkiln_converters.oneflow.layout import align_to_axis, check_channels_first
from graphkiln_converters.oneflow.translator import translates


@translates("normalization", "normalization_infer")
def batch_norm(op: Op) -> Value:
    """By the running statistics. A graph that was saved in training mode takes those of the batch: refused."""
    if op.flag("training", False):
        raise op.error("the graph was saved in training mode: call model.eval(), then trace and save it again")
    x, mean, variance, gamma, beta, addend = ((*group, None)[0] for group in (*op.operand_segments(), [], [], [])[:6])
    if mean is None or variance is None:
        raise op.error("it has no running statistics (track_running_stats=False): answers would depend on the batch")
    axis = op.axis()
    if axis != 1:
        perm = [*range(op.rank)]
        perm[1], perm[axis] = perm[axis], perm[1]
        turned = op.emit("Transpose", x, perm=perm)
        y = _by_channel(op, turned, (gamma, beta, mean, variance))
        y = op.emit("Transpose", y, perm=perm)
    else:
        y = _by_channel(op, x, (gamma, beta, mean, variance))
    return op.emit("Add", y, addend) if addend is not None else y


def _by_channel(op: Op, x: Value | None, parameters: tuple[Value | None, ...]) -> Value:
    return op.emit("BatchNormalization", x, *parameters, epsilon=op.number("epsilon"))


@translates("layer_norm")
def layer_norm(op: Op) -> Value:
    """Over the dimensions from `begin_norm_axis` on; a GPU's form (a CPU's is written out)."""
    axis = op.integer("begin_norm_axis") % op.rank
    if op.integer("begin_params_axis", -1) % op.rank != axis:
        raise op.error("begin_params_axis is not begin_norm_axis, which ONNX cannot say")
    x, *parameters = op.inputs
    scaled, shifted = op.flag("scale", len(parameters) > 0), op.flag("center", len(parameters) > 1)
    if len(parameters) != scaled + shifted:
        raise op.error(f"scale is {scaled}, center is {shifted}, but it has {len(parameters)} parameters")
    beta = parameters.pop(0) if shifted else None
    gamma = parameters[0] if scaled else op.emit("Expand", op.scalar(1.0), op.constant(op.shape[axis:]))
    return op.emit("LayerNormalization", x, gamma, beta, axis=axis, epsilon=op.number("epsilon"))


@translates("group_norm")
def group_norm(op: Op) -> Value:
    """Over the channels of a group and all their places; a GPU's form (a CPU's is written out)."""
    check_channels_first(op)
    if op.text("activation", "none") != "none":
        raise op.error(f"activation '{op.text('activation')}' cannot be translated")
    groups = op.integer("num_groups")
    grouped = op.emit("Reshape", op.x, op.constant([op.shape[0], groups, -1]))
    plain = (op.constant(np.full(groups, number), op.dtype) for number in (1, 0))
    y = op.emit("InstanceNormalization", grouped, *plain, epsilon=op.number("epsilon"))
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
    length = op.emit("Sqrt", op.emit("Max", squares, op.scalar(op.number("epsilon"))))
    return op.emit("Div", op.x, length), squares
