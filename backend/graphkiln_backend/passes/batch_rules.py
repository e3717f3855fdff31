"""Where each operator leaves the batch.

Source: ONNX operator schemas, version 18.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import onnx_ir

from graphkiln_backend.passes.batch_following import BatchAxis, Follower

# Where products, recurrent layers and quantized operators leave the batch: see `batch_rules`.
#
# Source: ONNX operator schemas, version 18.

_SEQUENCE_LENGTHS, _FIRST_STATE, _LAST_STATE = 4, 5, 6
"""Inputs of a recurrent layer that have a batch; the others are weights."""


def gemm(follower: Follower, node: onnx_ir.Node) -> BatchAxis:
    """`A B + C`, the batch in the rows of A."""
    a, b = follower.required(node, 0), follower.required(node, 1)
    rows = 1 if follower.integer(node, "transA") else 0
    if b in follower.axes or a not in follower.axes or follower.axes[a].axis != rows:
        raise follower.error(node, "the batch is not in the rows of the first factor")
    result = replace(follower.axes[a], axis=0)
    bias = node.inputs[2] if len(node.inputs) > 2 else None
    if bias is None:
        return result
    shape = follower.shape(bias)
    if bias in follower.axes:
        if follower.axes[bias] != result or len(shape) != 2:
            raise follower.error(node, "its inputs carry the batch in different places")
    elif len(shape) == 2 and shape[0] != 1:
        follower.carry(node, 2, result)
    return result


def einsum(follower: Follower, node: onnx_ir.Node) -> BatchAxis:
    """The batch has one letter, which is not summed over."""
    terms, _, result = node.attributes["equation"].as_string().replace(" ", "").partition("->")
    operands = terms.split(",")
    if not result or "." in terms:
        raise follower.error(node, "its equation does not name every axis")
    carried = {
        (operand[follower.axes[value].axis], replace(follower.axes[value], axis=0))
        for operand, value in zip(operands, node.inputs, strict=True)
        if value in follower.axes
    }
    ((letter, batch),) = carried if len(carried) == 1 else {("", BatchAxis(0))}
    if not letter or letter not in result:
        raise follower.error(node, "it sums over the batch, or its inputs carry it under different letters")
    for index, (operand, value) in enumerate(zip(operands, node.inputs, strict=True)):
        if value not in follower.axes and letter in operand:
            follower.carry(node, index, replace(batch, axis=operand.index(letter)))
    return replace(batch, axis=result.index(letter))


def recurrent(follower: Follower, node: onnx_ir.Node) -> tuple[BatchAxis, ...]:
    """LSTM, GRU and RNN: `[time, batch, features]`, or the batch first with `layout: 1`."""
    first = follower.integer(node, "layout") == 1
    batch = BatchAxis(0 if first else 1)
    if follower.axes.get(follower.required(node, 0)) != batch:
        raise follower.error(node, f"the batch of its input is not axis {batch.axis}: it would be taken for the time")
    for index, value in enumerate(node.inputs):
        if value is None or index == 0:
            continue
        place = {_SEQUENCE_LENGTHS: BatchAxis(0), _FIRST_STATE: batch, _LAST_STATE: batch}.get(index)
        if place is None or (index == _LAST_STATE and node.op_type != "LSTM"):
            if value in follower.axes:
                raise follower.error(node, "the batch comes in where weights are expected")
        elif value not in follower.axes:
            follower.carry(node, index, place)
        elif follower.axes[value] != place:
            raise follower.error(node, f"the batch of '{value.name}' is not axis {place.axis}")
    return (BatchAxis(0 if first else 2), batch, batch)


def batch_norm(follower: Follower, node: onnx_ir.Node) -> BatchAxis:
    """With saved statistics: in training mode they are those of the batch."""
    mode = follower.attribute(node, "training_mode")  # none before opset 14
    if mode is not None and mode.as_int():
        raise follower.error(node, "in training mode it normalizes by the statistics of the batch")
    batch = follower.data_axis(node)
    if batch.axis != 0:
        raise follower.error(node, f"the batch is axis {batch.axis}, expected 0")
    return batch


def dropout(follower: Follower, node: onnx_ir.Node) -> BatchAxis:
    """Of inference: it copies."""
    if len(node.inputs) > 2 and follower.constant(node, 2) != [0]:
        raise follower.error(node, "in training mode it is random")
    return follower.data_axis(node)


def mean_variance(follower: Follower, node: onnx_ir.Node) -> BatchAxis:
    """MeanVarianceNormalization, which by default takes all samples together."""
    batch = follower.data_axis(node)
    axes = follower.attribute(node, "axes")
    rank = len(follower.shape(node.inputs[0]))
    if axes is None or batch.axis in [axis % rank for axis in axes.as_ints()]:
        raise follower.error(node, "it normalizes by the statistics of the batch")
    return batch


def quantize(follower: Follower, node: onnx_ir.Node) -> BatchAxis:
    """With a scale for all, or one along another axis."""
    batch = follower.data_axis(node)
    axis = follower.integer(node, "axis") % max(1, len(follower.shape(node.inputs[0])))
    if follower.shape(node.inputs[1]) not in ((), (1,)) and axis == batch.axis:
        raise follower.error(node, "each sample has a scale of its own")
    return batch


def quantized_product(follower: Follower, node: onnx_ir.Node) -> BatchAxis:
    """QLinearMatMul and MatMulInteger: the batch in the first factor, not in its last axis."""
    batch = follower.data_axis(node)
    shape = follower.shape(node.inputs[0])
    weights = node.inputs[3 if node.op_type == "QLinearMatMul" else 1]
    if batch.axis == len(shape) - 1 or len(follower.shape(weights)) > 2:
        raise follower.error(node, "the batch is not in the rows of the first factor")
    return batch


# Where operators that rearrange values leave the batch: see `batch_rules`.
#
# Source: ONNX operator schemas, version 18.

_END = (1 << 63) - 1
"""The end of a slice that takes all there is."""


def flatten(follower: Follower, node: onnx_ir.Node) -> BatchAxis:
    """`[first axes, last axes]`."""
    batch = follower.data_axis(node)
    shape = follower.shape(node.inputs[0])
    at = follower.integer(node, "axis")
    at += len(shape) if at < 0 else 0
    start, stop, axis = (0, at, 0) if batch.axis < at else (at, len(shape), 1)
    before, after = math.prod(shape[start : batch.axis]), math.prod(shape[batch.axis + 1 : stop])
    return BatchAxis(axis, before * batch.before, batch.after * after)


def squeeze(follower: Follower, node: onnx_ir.Node) -> BatchAxis:
    """Without axes it would take away a batch of 1, too: they are named."""
    batch = follower.data_axis(node)
    shape = follower.shape(node.inputs[0])
    given = follower.constant(node, 1)
    axes = [axis % len(shape) for axis in given] if given is not None else _ones(shape, batch)
    if batch.axis in axes:
        raise follower.error(node, "it takes the batch away")
    if given is None:
        node.resize_inputs(2)
        follower.replace_constant(node, 1, axes)
    return replace(batch, axis=batch.axis - sum(axis < batch.axis for axis in axes))


def _ones(shape: tuple[int, ...], batch: BatchAxis) -> list[int]:
    return [axis for axis, size in enumerate(shape) if size == 1 and axis != batch.axis]


def split(follower: Follower, node: onnx_ir.Node) -> BatchAxis:
    """Along another axis than the batch; into one part along any."""
    batch = follower.data_axis(node)
    if follower.integer(node, "axis") % len(follower.shape(node.inputs[0])) == batch.axis:
        raise follower.error(node, "it splits the batch")
    return batch


def slice_(follower: Follower, node: onnx_ir.Node) -> BatchAxis:
    """Along other axes; or along the batch where it takes all of it."""
    batch = follower.data_axis(node)
    rank = len(follower.shape(node.inputs[0]))
    starts, ends = follower.constant(node, 1) or [], follower.constant(node, 2) or []
    axes = follower.constant(node, 3)
    steps = follower.constant(node, 4) or [1] * len(starts)
    places = [axis % rank for axis in (range(len(starts)) if axes is None else axes)]
    if batch.axis not in places:
        return batch
    at = places.index(batch.axis)
    size = follower.shape(node.inputs[0])[batch.axis]
    if (starts[at], steps[at]) != (0, 1) or ends[at] < size:
        raise follower.error(node, "it takes some samples of the batch")
    follower.replace_constant(node, 2, [_END if place == at else end for place, end in enumerate(ends)])
    return batch


def tile(follower: Follower, node: onnx_ir.Node) -> BatchAxis:
    """Repeats other axes."""
    batch = follower.data_axis(node)
    if (follower.constant(node, 1) or [])[batch.axis] != 1:
        raise follower.error(node, "it repeats the batch")
    return batch


def resize(follower: Follower, node: onnx_ir.Node) -> BatchAxis:
    """Along other axes; sizes that name the batch, too, are reduced to the others."""
    batch = follower.data_axis(node)
    rank = len(follower.shape(node.inputs[0]))
    axes = list(node.attributes["axes"].as_ints()) if "axes" in node.attributes else list(range(rank))
    places = [axis % rank for axis in axes]
    if batch.axis not in places:
        return batch
    index = 3 if follower.constant(node, 3) else 2
    numbers = follower.numbers(node, index)
    at = places.index(batch.axis)
    same = follower.shape(node.inputs[0])[batch.axis] if index == 3 else 1
    if numbers is None or numbers[at] != same:
        raise follower.error(node, "it resizes the batch")
    if index == 3:
        others = [place for place in places if place != batch.axis]
        follower.replace_constant(node, 3, [int(numbers[places.index(place)]) for place in others])
        follower.let_repair(lambda: node.attributes.add(onnx_ir.AttrInt64s("axes", others)))
    return batch


def gather_all(follower: Follower, node: onnx_ir.Node) -> bool:
    """Whether a Gather or GatherND picks every sample of the batch in order, as a copy does for a batch of any size."""
    data, indices = follower.required(node, 0), follower.required(node, 1)
    nd = node.op_type == "GatherND"
    axis = follower.integer(node, "batch_dims" if nd else "axis") % len(follower.shape(data))
    if follower.axes.get(data) != BatchAxis(axis):
        return False
    if follower.shape(indices) != ((follower.batch, 1) if nd else (follower.batch,)):
        return False
    if follower.constant(node, 1) != list(range(follower.batch)):
        return False
    follower.let_repair(lambda: _become_identity(node))
    return True


def _become_identity(node: onnx_ir.Node) -> None:
    node.op_type = "Identity"
    node.resize_inputs(1)
    node.attributes.clear()


def triangle(follower: Follower, node: onnx_ir.Node) -> BatchAxis:
    """Along the last two axes."""
    batch = follower.data_axis(node)
    if batch.axis >= len(follower.shape(node.inputs[0])) - 2:
        raise follower.error(node, "it works along the batch")
    return batch


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
        if gather_all(follower, node):
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
        if gather_all(follower, node):
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
    **dict.fromkeys(("GRU", "LSTM", "RNN"), recurrent),
    **dict.fromkeys(("DequantizeLinear", "QuantizeLinear"), quantize),
    **dict.fromkeys(("MatMulInteger", "QLinearMatMul"), quantized_product),
    **dict.fromkeys(("Hardmax", "LogSoftmax", "LpNormalization", "Softmax", "TopK"), _along(_attribute_axis)),
    **dict.fromkeys(("LayerNormalization", "RMSNormalization"), _along(_from_axis)),
    "BatchNormalization": batch_norm,
    "Concat": _along_together("it joins samples of the batch"),
    "CumSum": _along(_input_axis),
    "Dropout": dropout,
    "Einsum": einsum,
    "Expand": _expand,
    "Flatten": flatten,
    "Gather": _gather,
    "GatherElements": _along_together("it picks samples of the batch"),
    "GatherND": _gather_nd,
    "Gemm": gemm,
    "GridSample": _together,
    "MatMul": _matmul,
    "MeanVarianceNormalization": mean_variance,
    "OneHot": _one_hot,
    "Pad": _along(_padded_axes),
    "Reshape": _reshape,
    "Resize": resize,
    "Slice": slice_,
    "Split": split,
    "Squeeze": squeeze,
    "Tile": tile,
    "Transpose": _transpose,
    "Trilu": triangle,
    "Unsqueeze": _unsqueeze,
}
"""Operator -> its rule."""
