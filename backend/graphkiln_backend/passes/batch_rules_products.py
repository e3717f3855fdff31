"""Where products, recurrent layers and quantized operators leave the batch: see `batch_rules`.

Source: ONNX operator schemas, version 18.
"""

from __future__ import annotations

from dataclasses import replace

import onnx_ir

from graphkiln_backend.passes.batch_following import BatchAxis, Follower

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
