"""Where each operator leaves the batch.

Source: ONNX operator schemas, version 18.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import onnx_ir

from graphkiln_backend.passes import batch_rules_products as products
from graphkiln_backend.passes import batch_rules_shapes as shapes
from graphkiln_backend.passes.batch_following import BatchAxis, Follower

Rule = Callable[[Follower, onnx_ir.Node], BatchAxis | tuple[BatchAxis, ...]]
"""Where the outputs carry the batch: all in one place, or each in its own."""


def _elementwise(follower: Follower, node: onnx_ir.Node) -> BatchAxis:
    values = [value for value in node.inputs if value is not None]
    return follower.broadcast(node, values, max(len(follower.shape(value)) for value in values))


def _by_sample(follower: Follower, node: onnx_ir.Node) -> BatchAxis:
    """Convolutions, pooling and the like: the batch comes first."""
    batch = follower.data_axis(node)
    if batch.axis != 0:
        raise follower.error(node, f"the batch is axis {batch.axis}, expected 0")
    return batch


def _reshape(follower: Follower, node: onnx_ir.Node) -> BatchAxis:
    batch = follower.data_axis(node)
    source, target = follower.shape(node.inputs[0]), follower.shape(node.outputs[0])
    if not math.prod(source):
        raise follower.error(node, "what it reshapes is empty")
    ahead = math.prod(source[: batch.axis]) * batch.before
    places = []
    passed = 1
    for axis, size in enumerate(target):
        if ahead % passed == 0 and size % (ahead // passed * follower.batch) == 0:
            before = ahead // passed
            places.append(BatchAxis(axis, before, size // (before * follower.batch)))
        passed *= size
    if not places:
        raise follower.error(node, f"{list(source)} -> {list(target)} tears the batch apart")
    # Where the batch was 1, more than one axis can have it: that of size 1 before those that hold more.
    place = follower.choose(node, sorted(places, key=lambda place: place.before * place.after != 1))
    follower.replace_constant(node, 1, [-1 if axis == place.axis else size for axis, size in enumerate(target)])
    return place


def _transpose(follower: Follower, node: onnx_ir.Node) -> BatchAxis:
    batch = follower.data_axis(node)
    rank = len(follower.shape(node.inputs[0]))
    perm = list(node.attributes["perm"].as_ints()) if "perm" in node.attributes else list(range(rank))[::-1]
    return replace(batch, axis=perm.index(batch.axis))


def _expand(follower: Follower, node: onnx_ir.Node) -> BatchAxis:
    batch = follower.data_axis(node)
    target = list(follower.shape(node.outputs[0]))
    axis = batch.axis + len(target) - len(follower.shape(node.inputs[0]))
    target[axis] = 1  # as the input has it
    follower.replace_constant(node, 1, target)
    return replace(batch, axis=axis)


def _together(follower: Follower, node: onnx_ir.Node) -> BatchAxis:
    """All inputs carry the batch in the same place, without broadcasting."""
    (first, *others) = {follower.axes[value] for value in node.inputs if value in follower.axes}
    if others:
        raise follower.error(node, f"its inputs carry the batch in different places: {first}, {others[0]}")
    for index, value in enumerate(node.inputs):
        if value not in follower.axes:
            follower.carry(node, index, first)
    return first


def _along_together(why: str) -> Rule:
    """A rule for nodes that take all inputs together along their axis."""

    def rule(follower: Follower, node: onnx_ir.Node) -> BatchAxis:
        batch = _together(follower, node)
        if batch.axis == follower.integer(node, "axis") % len(follower.shape(node.outputs[0])):
            raise follower.error(node, why)
        return batch

    return rule


def _unsqueeze(follower: Follower, node: onnx_ir.Node) -> BatchAxis:
    batch = follower.data_axis(node)
    rank = len(follower.shape(node.outputs[0]))
    new = {axis % rank for axis in follower.constant(node, 1) or ()}
    return replace(batch, axis=[axis for axis in range(rank) if axis not in new][batch.axis])


def _matmul(follower: Follower, node: onnx_ir.Node) -> BatchAxis:
    a, b = follower.required(node, 0), follower.required(node, 1)
    ranks = len(follower.shape(a)), len(follower.shape(b))
    rank = max(*ranks, 2)
    if min(ranks) < 2:
        raise follower.error(node, "a vector has no batch")
    for value, contracted in ((a, ranks[0] - 1), (b, ranks[1] - 2)):
        if value in follower.axes and follower.axes[value].axis == contracted:
            raise follower.error(node, "it sums over the batch")
    for value, own in ((a, ranks[0] - 2), (b, ranks[1] - 1)):
        if value in follower.axes and follower.axes[value].axis == own:
            if (b if value is a else a) in follower.axes:
                raise follower.error(node, "both factors carry the batch, one of them in its rows or columns")
            return replace(follower.axes[value], axis=rank - 2 if value is a else rank - 1)
    return follower.broadcast(node, [a, b], rank)


def _along(axis_of: Callable[[Follower, onnx_ir.Node], list[int]]) -> Rule:
    """A rule for nodes that work along some axes and keep the rank."""

    def rule(follower: Follower, node: onnx_ir.Node) -> BatchAxis:
        batch = follower.data_axis(node)
        rank = len(follower.shape(node.inputs[0]))
        if batch.axis in [axis % rank for axis in axis_of(follower, node)]:
            raise follower.error(node, "it works along the batch")
        return batch

    return rule


def _attribute_axis(follower: Follower, node: onnx_ir.Node) -> list[int]:
    return [follower.integer(node, "axis")]


def _from_axis(follower: Follower, node: onnx_ir.Node) -> list[int]:
    rank = len(follower.shape(node.inputs[0]))
    return list(range(follower.integer(node, "axis") % rank, rank))


def _input_axis(follower: Follower, node: onnx_ir.Node) -> list[int]:
    return follower.constant(node, 1) or []


def _padded_axes(follower: Follower, node: onnx_ir.Node) -> list[int]:
    widths = follower.constant(node, 1) or []
    count = len(widths) // 2
    axes = follower.constant(node, 3) or list(range(count))
    return [axis for at, axis in enumerate(axes) if widths[at] or widths[at + count]]


def _reduction(follower: Follower, node: onnx_ir.Node) -> BatchAxis:
    batch = follower.data_axis(node)
    rank = len(follower.shape(node.inputs[0]))
    single = follower.attribute(node, "axis")
    given = follower.constant(node, 1) if single is None else [single.as_int()]
    axes = {axis % rank for axis in (given or range(rank))}
    if batch.axis in axes:
        raise follower.error(node, "it takes the samples of the batch together")
    if follower.integer(node, "keepdims"):
        return batch
    return replace(batch, axis=batch.axis - sum(axis < batch.axis for axis in axes))


def _gather(follower: Follower, node: onnx_ir.Node) -> BatchAxis:
    data, indices = follower.required(node, 0), follower.required(node, 1)
    rank, axis = len(follower.shape(data)), follower.integer(node, "axis")
    axis %= rank
    if data in follower.axes and indices in follower.axes:
        raise follower.error(node, "data and indices both carry the batch")
    if indices in follower.axes:
        own = follower.axes[indices]
        return replace(own, axis=own.axis + axis)
    own = follower.axes[data]
    if own.axis == axis:
        if shapes.gather_all(follower, node):
            return own
        raise follower.error(node, "it picks samples of the batch")
    return own if own.axis < axis else replace(own, axis=own.axis + len(follower.shape(indices)) - 1)


def _one_hot(follower: Follower, node: onnx_ir.Node) -> BatchAxis:
    batch = follower.data_axis(node)
    new = follower.integer(node, "axis") % len(follower.shape(node.outputs[0]))
    return replace(batch, axis=batch.axis + (new <= batch.axis))


def _gather_nd(follower: Follower, node: onnx_ir.Node) -> BatchAxis:
    data, indices = follower.required(node, 0), follower.required(node, 1)
    index_shape = follower.shape(indices)
    if data in follower.axes and indices in follower.axes:
        raise follower.error(node, "data and indices both carry the batch")
    if indices in follower.axes:
        return follower.axes[indices]
    own = follower.axes[data]
    if own.axis < index_shape[-1]:
        if shapes.gather_all(follower, node):
            return own
        raise follower.error(node, "it picks samples of the batch")
    return replace(own, axis=own.axis - index_shape[-1] + len(index_shape) - 1)


_ELEMENTWISE = (
    "Abs Acos Acosh Add And Asin Asinh Atan Atanh BitShift BitwiseAnd BitwiseNot BitwiseOr BitwiseXor Cast Ceil Celu "
    "Clip Cos Cosh Div Elu Equal Erf Exp Floor Gelu Greater GreaterOrEqual HardSigmoid HardSwish Identity IsInf IsNaN "
    "LeakyRelu Less LessOrEqual Log Max Mean Min Mish Mod Mul Neg Not Or PRelu Pow Reciprocal Relu Round Selu Shrink "
    "Sigmoid Sign Sin Sinh Softplus Softsign Sqrt Sub Sum Swish Tan Tanh ThresholdedRelu Where Xor"
)
_BY_SAMPLE = (
    "AveragePool Conv ConvInteger ConvTranspose DepthToSpace GlobalAveragePool GlobalLpPool GlobalMaxPool "
    "GroupNormalization InstanceNormalization LRN LpPool MaxPool QLinearConv SpaceToDepth"
)
_REDUCTIONS = (
    "ArgMax ArgMin ReduceL1 ReduceL2 ReduceLogSum ReduceLogSumExp ReduceMax ReduceMean ReduceMin ReduceProd ReduceSum "
    "ReduceSumSquare"
)
RULES: dict[str, Rule] = {
    **dict.fromkeys(_ELEMENTWISE.split(), _elementwise),
    **dict.fromkeys(_BY_SAMPLE.split(), _by_sample),
    **dict.fromkeys(_REDUCTIONS.split(), _reduction),
    **dict.fromkeys(("GRU", "LSTM", "RNN"), products.recurrent),
    **dict.fromkeys(("DequantizeLinear", "QuantizeLinear"), products.quantize),
    **dict.fromkeys(("MatMulInteger", "QLinearMatMul"), products.quantized_product),
    **dict.fromkeys(("Hardmax", "LogSoftmax", "LpNormalization", "Softmax", "TopK"), _along(_attribute_axis)),
    **dict.fromkeys(("LayerNormalization", "RMSNormalization"), _along(_from_axis)),
    "BatchNormalization": products.batch_norm,
    "Concat": _along_together("it joins samples of the batch"),
    "CumSum": _along(_input_axis),
    "Dropout": products.dropout,
    "Einsum": products.einsum,
    "Expand": _expand,
    "Flatten": shapes.flatten,
    "Gather": _gather,
    "GatherElements": _along_together("it picks samples of the batch"),
    "GatherND": _gather_nd,
    "Gemm": products.gemm,
    "GridSample": _together,
    "MatMul": _matmul,
    "MeanVarianceNormalization": products.mean_variance,
    "OneHot": _one_hot,
    "Pad": _along(_padded_axes),
    "Reshape": _reshape,
    "Resize": shapes.resize,
    "Slice": shapes.slice_,
    "Split": shapes.split,
    "Squeeze": shapes.squeeze,
    "Tile": shapes.tile,
    "Transpose": _transpose,
    "Trilu": shapes.triangle,
    "Unsqueeze": _unsqueeze,
}
"""Operator -> its rule."""
