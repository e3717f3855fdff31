"""Tensor parallelism: split one weight by columns and the next by rows, followed by an all-reduce.

A cut starts at the columns of a weight and is propagated in both directions through the nodes in between, for example
activations and attention heads, until it ends at the rows of another weight, whose product is a partial sum. Products
for which this fails are replicated in every shard.

Source: M. Shoeybi et al., "Megatron-LM: Training Multi-Billion Parameter Language Models", 2019.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir
from onnx_ir.passes.common import RemoveUnusedNodesPass

from graphkiln_backend.graph.errors import LoweringError
from graphkiln_backend.passes.node_costs import ALL_REDUCE, PARTIAL, load_for_splitting
from graphkiln_backend.passes.sharding_rules import (
    CannotShard,
    Cut,
    Effects,
    Value,
    add_weight,
    check_divides,
    dims,
    follow_cuts,
    holds_weights,
    is_weight,
    state_size,
)
from graphkiln_backend.passes.splicing import insert_behind
from graphkiln_backend.repository.training_mode import DRAWING

_DOMAIN = "graphkiln"
_BLOCKS = (1, 3, 2)  # matrices packed in one weight: a single one; query, key and value; key and value


@dataclass(frozen=True, kw_only=True, slots=True)
class Sharded:
    """A shard of a graph.

    Attributes:
        model: Graph of the shard, with an `AllReduce` after each partial sum.
        local: Names of activations that are split over the shards.
    """

    model: onnx_ir.Model
    local: frozenset[str]


@dataclass(slots=True)
class Region:
    """A connected set of cut activations, and the effects on nodes.

    Attributes:
        cuts: Activation -> cut.
        effects: Effects on each node that reads or computes a cut activation.
    """

    cuts: dict[Value, Cut] = field(default_factory=dict)
    effects: dict[onnx_ir.Node, Effects] = field(default_factory=dict)


def shard_graph(graph_path: Path, shards: int, shard: int) -> Sharded:
    """Return one shard of a graph.

    Args:
        graph_path: The graph.
        shards: Number of shards, at least 2.
        shard: Index of the shard, from 0.

    Raises:
        LoweringError: The graph cannot be read, or none of its products can be split into this many shards.
    """
    model = load_for_splitting(graph_path)
    _check_draws(model)
    state_shapes(model)
    region, reasons = find_regions(model, shards)
    if not region.effects:
        raise LoweringError(
            f"no product of {graph_path} can be cut into {shards} shards",
            attempts=tuple(f"{node.name}: {reason}" for node, reason in islice(reasons.items(), 3)),
            hint="choose another `tensor` size, or `pipeline`, which cuts between products",
        )
    _cut_weights(model, region, shards, shard)
    for value, cut in region.cuts.items():
        sizes: list[Any] = list(value.shape or ())
        sizes[cut.axis] = sizes[cut.axis] // shards if isinstance(sizes[cut.axis], int) else None
        value.shape = onnx_ir.Shape(sizes)
    partial = [_add_up(model, node.outputs[0]) for node, effects in region.effects.items() if effects.reduced]
    padded = cut_columns(model, shards, shard, region.effects)
    columns = [str(value.producer().inputs[0].name) for value in padded]  # type: ignore[union-attr]
    partial += [_add_up(model, value) for value in padded]
    model.opset_imports[_DOMAIN] = 1
    local = frozenset((*(str(value.name) for value in region.cuts), *partial, *columns))
    RemoveUnusedNodesPass()(model)
    return Sharded(model=model, local=local)


def _check_draws(model: onnx_ir.Model) -> None:
    """Reject graphs whose shards would draw different random numbers.

    Raises:
        LoweringError: A node draws random numbers without a seed.
    """
    for node in onnx_ir.traversal.RecursiveGraphIterator(model.graph):
        if node.op_type in DRAWING and "seed" not in node.attributes:
            raise LoweringError(
                "the graph cannot be cut into shards",
                attempts=(f"{node.op_type} {node.name} draws random numbers, and each shard would draw its own",),
                hint="choose `pipeline`, or make the random numbers an input of the graph",
            )


def find_regions(model: onnx_ir.Model, shards: int) -> tuple[Region, dict[onnx_ir.Node, str]]:
    """Return the regions that can be cut, and the reason for each product that is replicated instead.

    Args:
        model: The graph, with inferred shapes; not changed.
        shards: Number of shards.
    """
    found, reasons = Region(), dict[onnx_ir.Node, str]()
    for node in model.graph:
        if node.op_type not in ("MatMul", "Gemm") or node in found.effects or not holds_weights(node.inputs[1]):
            continue
        try:
            region = _grow(model, node, shards)
        except CannotShard as reason:
            reasons[node] = str(reason)
            continue
        found.cuts |= region.cuts
        found.effects |= region.effects
    return found, {node: reason for node, reason in reasons.items() if node not in found.effects}


def _grow(model: onnx_ir.Model, node: onnx_ir.Node, shards: int) -> Region:
    """Return the region that starts at the columns of a product, or raise `CannotShard`."""
    seed = node.outputs[0]
    *_, size = dims(seed)
    reasons = []
    for blocks in _BLOCKS:
        try:
            return _follow(model, seed, Cut(len(dims(seed)) - 1, _block(size, blocks)), shards)
        except CannotShard as reason:
            reasons.append(reason)
    raise reasons[0]


def _block(size: object, blocks: int) -> int:
    if not isinstance(size, int) or size % blocks:
        raise CannotShard(f"a dimension of {size} does not hold {blocks} equal blocks")
    return size // blocks


def _follow(model: onnx_ir.Model, seed: Value, cut: Cut, shards: int) -> Region:
    """Propagate a cut to a fixed point."""
    region = Region(cuts={seed: cut})
    touched: dict[onnx_ir.Node, None] = {}
    waiting = [seed]
    while waiting:
        value = waiting.pop()
        check_divides(value, region.cuts[value], shards)
        for node in _around(model, value):
            touched[node] = None
            for other, follows in follow_cuts(node, region.cuts, shards).values.items():
                if other not in region.cuts:
                    region.cuts[other] = follows
                    waiting.append(other)
                elif region.cuts[other] != follows:
                    raise CannotShard(f"'{other.name}' would be cut in two ways")
    region.effects = {node: follow_cuts(node, region.cuts, shards) for node in touched}
    if not any(effects.reduced for effects in region.effects.values()):
        raise CannotShard("the cut does not end in a partial sum")
    return region


def _around(model: onnx_ir.Model, value: Value) -> Iterator[onnx_ir.Node]:
    """Yield the producer and the readers of an activation; raise `CannotShard` if there are others."""
    producer = value.producer()
    if producer is None or value.is_graph_output():
        raise CannotShard(f"'{value.name}' is an input or output of the graph")
    for node in (producer, *value.consumers()):
        if node.graph is not model.graph:
            raise CannotShard(f"'{value.name}' is read by a subgraph")
        yield node


def _cut_weights(model: onnx_ir.Model, region: Region, shards: int, shard: int) -> None:
    """Replace the weights of every node with those of one shard; equal parts of a weight are shared."""
    made: dict[tuple[str, str], Value] = {}
    for node, effects in region.effects.items():
        for number, array, key in _new_weights(node, effects, shards, shard):
            owner, own = _holder(node, number)
            name = str(owner.inputs[own].name)  # type: ignore[union-attr]
            if (name, key) not in made:
                made[name, key] = add_weight(model, f"{name}_{key}", array)
            owner.replace_input_with(own, made[name, key])
        state_size(model, node, effects, shards)


def _holder(node: onnx_ir.Node, number: int) -> tuple[onnx_ir.Node, int]:
    """Return the node and input index that read the weight: a DequantizeLinear upstream if it is quantized."""
    value = node.inputs[number]
    before = value.producer() if value is not None and not is_weight(value) else None
    return (before, 0) if before is not None else (node, number)


def _new_weights(node: onnx_ir.Node, effects: Effects, shards: int, shard: int) -> Iterator[tuple[int, Any, str]]:
    """Yield the changed weights of a node in a shard: input index, array, suffix of the new name."""
    for number, cut in effects.weights.items():
        array = _tensor(node, number).numpy()  # type: ignore[union-attr]
        part = np.take(array, cut.indices(array.shape[cut.axis], shards, shard), axis=cut.axis)
        yield number, part, f"part{cut.axis}x{cut.block}"
    for number in effects.divided:
        yield number, _tensor(node, number).numpy() // shards, "divided"  # type: ignore[union-attr]
    for number in effects.first_only if shard else ():
        yield number, _nothing(*_holder(node, number)), "zero"
    if effects.target and is_weight(node.inputs[effects.shape_input]):
        sizes = _tensor(node, effects.shape_input).numpy().copy()  # type: ignore[union-attr]
        axis = effects.target.axis - len(dims(node.outputs[0])) + len(sizes)
        if axis >= 0 and sizes[axis] > 1:
            sizes[axis] //= shards
        yield effects.shape_input, sizes, f"shape{axis}"


def _nothing(node: onnx_ir.Node, number: int) -> Any:
    """Return zeros in place of a weight, or integers that are dequantized to zeros."""
    zeros = np.zeros_like(_tensor(node, number).numpy())  # type: ignore[union-attr]
    point = _tensor(node, 2) if node.op_type == "DequantizeLinear" and len(node.inputs) > 2 else None
    return zeros if point is None else zeros + point.numpy()


def _tensor(node: onnx_ir.Node, number: int) -> onnx_ir.TensorProtocol | None:
    value = node.inputs[number]
    return value.const_value if value is not None else None


def _add_up(model: onnx_ir.Model, value: Value) -> str:
    """Insert an `AllReduce` after a partial sum; return the new name of the partial sum."""
    insert_behind(model, value, onnx_ir.node(ALL_REDUCE, [value], domain=_DOMAIN), PARTIAL)
    return str(value.name)


# Embedding tables, and large products outside of regions (for example from hidden states to a vocabulary), are split
# by columns. Each shard pads its columns with zeros to the full width, so that the sum over all shards is the result.

# Smallest weights to split, in bytes; below, the all-reduce takes longer than computing the whole product.
_WORTH_TABLE_BYTES = 1 << 20
_WORTH_PRODUCT_BYTES = 8 << 20


def cut_columns(model: onnx_ir.Model, shards: int, shard: int, cut: Collection[onnx_ir.Node] = ()) -> list[Value]:
    """Split the embedding tables and large products outside of regions by columns, in place.

    Args:
        model: The graph.
        shards: Number of shards.
        shard: Index of this shard, from 0.
        cut: Nodes that are cut already.

    Returns:
        The padded columns, which need an all-reduce.
    """
    whole = [node for node in model.graph if node not in cut]
    return [_cut(model, node, shards, shard) for node in whole if _is_lookup(node, shards) or _is_large(node)]


def _is_lookup(node: onnx_ir.Node, shards: int) -> bool:
    """Return True for a lookup in a large table whose columns can be split evenly."""
    if node.op_type != "Gather" or node.attributes.get_int("axis") not in (None, 0):
        return False
    table, numbers = node.inputs[0], node.inputs[1]
    if table is None or numbers is None or not is_weight(table) or numbers.shape is None or table.const_value is None:
        return False
    _, *columns = table.const_value.numpy().shape
    divides = len(columns) == 1 and columns[0] % shards == 0
    large = table.const_value.nbytes >= _WORTH_TABLE_BYTES
    return divides and large and len(table.uses()) == 1 and not is_weight(numbers)


def _is_large(node: onnx_ir.Node) -> bool:
    """Return True for a product with a large weight that no other node reads."""
    if node.op_type not in ("MatMul", "Gemm") or node.attributes.get_int("transA") == 1 or len(node.inputs) < 2:
        return False
    matrix, bias = node.inputs[1], node.inputs[2] if len(node.inputs) > 2 else None
    if matrix is None or matrix.const_value is None or not is_weight(matrix) or node.outputs[0].shape is None:
        return False
    large = matrix.const_value.nbytes >= _WORTH_PRODUCT_BYTES and len(matrix.const_value.shape) == 2
    row = bias is None or (is_weight(bias) and bias.shape is not None and bias.shape.rank() == 1)
    return large and row and len(matrix.uses()) == 1


def _cut(model: onnx_ir.Model, node: onnx_ir.Node, shards: int, shard: int) -> Value:
    """Replace the weights of a node with its columns, pad the result, and return the padded value."""
    found: Any = node.outputs[0]
    inputs: Any = node.inputs
    if node.op_type == "Gather":
        weights, rank = [(0, 1)], len(inputs[1].shape) + 1
    else:  # the matrix, and a bias
        weights, rank = [(1, 0 if node.attributes.get_int("transB") == 1 else 1), (2, 0)], len(found.shape)
    number, axis = weights[0]
    width = int(inputs[number].const_value.shape[axis])
    begin, end = width * shard // shards, width * (shard + 1) // shards
    for number, axis in weights:
        value = inputs[number] if number < len(inputs) else None
        if value is not None and value.const_value.shape[axis] == width:  # a scalar bias applies to every column
            part = np.take(value.const_value.numpy(), range(begin, end), axis)
            node.replace_input_with(number, add_weight(model, f"{value.name}_columns", part))
    pads = np.zeros(2 * rank, np.int64)
    pads[rank - 1], pads[-1] = begin, width - end
    padded = onnx_ir.node("Pad", [found, add_weight(model, f"{found.name}_pads", pads)], name=f"{node.name}_padded")
    result = insert_behind(model, found, padded, "_columns")
    found.shape = None if found.shape is None else onnx_ir.Shape([*list(found.shape)[:-1], end - begin])
    return result


# Exporters compute Reshape shapes like `[batch, 128, 12, 64]` from the shape of an input. As the constant
# `[-1, 128, 12, 64]` a shard can replace the 12.


def state_shapes(model: onnx_ir.Model) -> None:
    """Replace computed Reshape shapes with constants, in place, and remove the nodes that computed them.

    Args:
        model: The graph, with inferred shapes.
    """
    made: dict[tuple[int, ...], onnx_ir.Value] = {}
    for node in model.graph:
        if node.op_type != "Reshape" or node.domain not in ("", "ai.onnx") or len(node.inputs) < 2:
            continue
        shape = node.inputs[1]
        sizes = None if shape is None or shape.is_initializer() else _sizes(node)
        if sizes is not None:
            if sizes not in made:
                name = "shape_" + "_".join(map(str, sizes)).replace("-1", "rest")
                made[sizes] = add_weight(model, name, np.array(sizes, np.int64))
            node.replace_input_with(1, made[sizes])
            node.attributes.pop("allowzero", None)
    RemoveUnusedNodesPass()(model)


def _sizes(node: onnx_ir.Node) -> tuple[int, ...] | None:
    """Return the target shape of a Reshape: 0 copies the input's dimension, -1 for one other dynamic dimension."""
    data, out = node.inputs[0], node.outputs[0].shape
    if data is None or out is None:
        return None
    before: list[Any] = list(data.shape) if data.shape is not None else []
    sizes = []
    for axis, size in enumerate(out):
        if isinstance(size, int):
            sizes.append(size)
        else:
            sizes.append(0 if axis < len(before) and size.value is not None and before[axis] == size else -1)
    return tuple(sizes) if sizes.count(-1) <= 1 and not any(size == 0 for size in out) else None
