"""Where operators that rearrange values leave the batch: see `batch_rules`.

Source: ONNX operator schemas, version 18.
"""

from __future__ import annotations

import math
from dataclasses import replace

import onnx_ir

from graphkiln_backend.passes.batch_following import BatchAxis, Follower

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
