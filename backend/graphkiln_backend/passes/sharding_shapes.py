"""How cuts go through nodes that make other shapes: reshaped, split, repeated, filled and looked up tensors.

Where the shape of an output is an input of the node, its size along the cut is written down for a shard: in a shape
that is a weight, or over one that is computed.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir

from graphkiln_backend.passes.sharding_cuts import (
    CannotShard,
    Cut,
    Effects,
    Facts,
    Value,
    add_weight,
    checked,
    cuts_of,
    dims,
    elements,
    fact_of,
    is_weight,
    only_cut,
)


def reshaped(node: onnx_ir.Node, facts: Facts, shards: int) -> Effects:
    """A Reshape: whole parts stay together."""
    data, out = node.inputs[0], node.outputs[0]
    if data is None:
        raise CannotShard(f"{node.name} reads nothing")
    fed, got = fact_of(facts, data), fact_of(facts, out)
    target = got or _carried(data, fed, out, shards)
    source = fed or _carried(out, got, data, shards)
    if _carried(data, source, out, shards) != target:
        raise CannotShard(f"{node.name} does not keep parts together")
    _check_stated(node, 1, target)
    return Effects(values={data: source, out: target}, target=target)


def split_along(node: onnx_ir.Node, facts: Facts, shards: int) -> Effects:
    """A Split: along another dimension than the cut, or into outputs of whole blocks, as queries, keys and values."""
    data = node.inputs[0]
    cut = only_cut((cut for _, cut in cuts_of(node, facts)), node)
    axis = node.attributes.get_int("axis", 0) % len(dims(node.outputs[0]))
    if data is None or is_weight(data):
        raise CannotShard(f"{node.name} reads a weight")
    values = dict.fromkeys((data, *node.outputs), cut)
    if cut.axis != axis:
        return Effects(values=values)
    sizes = [dims(value)[axis] for value in node.outputs]
    if any(not isinstance(size, int) or size % cut.block for size in sizes) or cut.block % shards:
        raise CannotShard(f"{node.name} needs the whole of dimension {axis}")
    stated = node.inputs[1] if len(node.inputs) > 1 else None
    if stated is not None and not is_weight(stated):
        raise CannotShard(f"{node.name} computes its sizes")
    return Effects(values=values, divided=frozenset([1]) if stated is not None else frozenset())


def filled(node: onnx_ir.Node, facts: Facts, shards: int) -> Effects:  # noqa: ARG001 - as all rules
    """A ConstantOfShape: a shard makes its part."""
    out = node.outputs[0]
    cut = only_cut((cut for _, cut in cuts_of(node, facts)), node)
    _check_stated(node, 0, cut)
    return Effects(values={out: cut}, target=cut, shape_input=0)


def expanded(node: onnx_ir.Node, facts: Facts, shards: int) -> Effects:
    """An Expand: what is repeated along the cut is whole in every shard, what is there once or more is cut."""
    data, out = node.inputs[0], node.outputs[0]
    if data is None:
        raise CannotShard(f"{node.name} reads nothing")
    more = len(dims(out)) - len(dims(data))
    fed, got = fact_of(facts, data), fact_of(facts, out)
    cut = only_cut((*([Cut(fed.axis + more, fed.block)] if fed else []), *([got] if got else [])), node)
    _check_stated(node, 1, cut)
    axis = cut.axis - more
    if axis < 0 or dims(data)[axis] == 1:
        if fed:
            raise CannotShard(f"{node.name} repeats what is cut")
        return Effects(values={out: cut}, target=cut)
    if dims(data)[axis] != dims(out)[cut.axis]:
        raise CannotShard(f"{node.name} combines sizes that are not known to be equal")
    if is_weight(data):
        weights = checked(node, {0: Cut(axis, cut.block)}, shards)
        return Effects(values={out: cut}, weights=weights, target=cut)
    return Effects(values={data: Cut(axis, cut.block), out: cut}, target=cut)


def looked_up(node: onnx_ir.Node, facts: Facts, shards: int) -> Effects:
    """A Gather in a table: columns of the table, as the positions' biases of heads; or of an activation: kept axes."""
    table, out = node.inputs[0], node.outputs[0]
    if table is None or node.inputs[1] is None:
        raise CannotShard(f"{node.name} reads nothing")
    kept = len(dims(node.inputs[1]))
    axis = node.attributes.get_int("axis", 0) % len(dims(table))
    origin = [*range(axis), *[-1] * kept, *range(axis + 1, len(dims(table)))]
    fed, got = fact_of(facts, table), fact_of(facts, out)
    if got and origin[got.axis] < 0:
        raise CannotShard(f"{node.name} makes dimension {got.axis}")
    if is_weight(table):
        if got is None:
            raise CannotShard(f"{node.name} looks up what is cut")
        return Effects(values={out: got}, weights=checked(node, {0: Cut(origin[got.axis], got.block)}, shards))
    if not is_weight(node.inputs[1]):
        raise CannotShard(f"{node.name} reads what is computed")
    if got:
        return Effects(values={table: Cut(origin[got.axis], got.block), out: got})
    if fed is None or fed.axis not in origin:
        raise CannotShard(f"{node.name} takes away what is cut")
    return Effects(values={table: fed, out: Cut(origin.index(fed.axis), fed.block)})


def state_size(model: onnx_ir.Model, node: onnx_ir.Node, effects: Effects, shards: int) -> None:
    """Writes over a computed shape what a shard has of the dimension that is cut, in place.

    Args:
        model: The graph.
        node: Reads the shape of its output; that output still has the whole's.
        effects: What follows for it.
        shards: How many there are.
    """
    target = effects.target
    shape = node.inputs[effects.shape_input] if target else None
    if target is None or shape is None or is_weight(shape):
        return
    sizes = dims(node.outputs[0])
    here = np.arange(len(sizes)) == target.axis
    local = np.full(len(sizes), sizes[target.axis] // shards, np.int64)
    name = f"{shape.name}_of_{node.name or node.outputs[0].name}"
    weights = [add_weight(model, f"{name}_{what}", array) for what, array in (("here", here), ("size", local))]
    stated = onnx_ir.node("Where", [*weights, shape], name=f"{name}_stated")
    result = stated.outputs[0]
    result.name, result.shape, result.type = f"{name}_stated", shape.shape, onnx_ir.TensorType(onnx_ir.DataType.INT64)
    model.graph.insert_before(node, stated)
    node.replace_input_with(effects.shape_input, result)


def _check_stated(node: onnx_ir.Node, number: int, target: Cut) -> None:
    """Raises `CannotShard` where a shard's size along the cut could not be written down."""
    shape, sizes = node.inputs[number], dims(node.outputs[0])
    if is_weight(shape):
        return
    if not isinstance(sizes[target.axis], int) or dims(shape) != [len(sizes)]:
        raise CannotShard(f"{node.name} computes its shape")


def _carried(data: Value, cut: Cut | None, out: Value, shards: int) -> Cut:
    """A cut through a tensor as one through the same elements in another shape.

    A cut tensor is a row of blocks, each of which is cut into equal parts; the blocks stay what they are.
    """
    if cut is None:
        raise CannotShard(f"nothing is known of '{data.name}'")
    source, target = dims(data), dims(out)
    block, behind = cut.block * elements(source[cut.axis + 1 :]), 1
    for axis in range(len(target) - 1, -1, -1):
        size = target[axis]
        if not isinstance(size, int) or size * behind >= block:
            whole = isinstance(size, int) or _begins_alike(source, cut.axis, target[:axis])
            own = block // behind
            if block % behind or own % shards or not whole or (isinstance(size, int) and size % own):
                break
            return Cut(axis, own)
        behind *= size
    raise CannotShard(f"'{out.name}' has no dimension that holds whole parts of '{data.name}'")


def _begins_alike(source: list[Any], axis: int, before: list[Any]) -> bool:
    """Whether dimensions before a cut are those before another one, so that as many blocks lie behind both."""
    return len(before) <= axis and source[: len(before)] == before
