"""Cuts the tables of embeddings into columns: each shard looks up its own, and a sum puts them beside each other.

What a shard looks up is padded with zeros to the width of the whole table, so that the sum over all shards is the row.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import numpy as np
import onnx_ir

from graphkiln_backend.passes.sharding_cuts import Cut, Value, add_weight, is_weight
from graphkiln_backend.passes.splicing import insert_behind

_WORTH_BYTES = 1 << 20
"""Of a table: looking up in a smaller one in every shard costs less than a sum."""


def cut_tables(model: onnx_ir.Model, shards: int, shard: int, cut: Collection[onnx_ir.Node] = ()) -> list[Value]:
    """Cuts the tables of a graph, in place.

    Args:
        model: The graph.
        shards: How many there are.
        shard: Which one this is.
        cut: Nodes whose tables are cut already.

    Returns:
        The padded rows of each lookup, still to be summed up.
    """
    lookups = [node for node in model.graph if node not in cut and _is_lookup(node, shards)]
    return [_cut(model, node, shards, shard) for node in lookups]


def _is_lookup(node: onnx_ir.Node, shards: int) -> bool:
    """Whether a node reads rows of a large table whose columns can be divided."""
    if node.op_type != "Gather" or node.attributes.get_int("axis") not in (None, 0):
        return False
    table, numbers = node.inputs[0], node.inputs[1]
    if table is None or numbers is None or not is_weight(table) or numbers.shape is None or table.const_value is None:
        return False
    _, *columns = table.const_value.numpy().shape
    divides = len(columns) == 1 and columns[0] % shards == 0
    return divides and table.const_value.nbytes >= _WORTH_BYTES and len(table.uses()) == 1 and not is_weight(numbers)


def _cut(model: onnx_ir.Model, node: onnx_ir.Node, shards: int, shard: int) -> Value:
    """Gives a lookup its columns, and pads what it finds."""
    table: Any = node.inputs[0]
    array = table.const_value.numpy()
    width = array.shape[1]
    own = width // shards
    columns = Cut(1, width).indices(width, shards, shard)
    node.replace_input_with(0, add_weight(model, f"{table.name}_columns", array[:, columns]))
    rank = len(node.inputs[1].shape or ()) + 1 if node.inputs[1] is not None else 2
    return pad_columns(model, node, shard * own, (shard + 1) * own, width=width, rank=rank)


def pad_columns(model: onnx_ir.Model, node: onnx_ir.Node, begin: int, end: int, *, width: int, rank: int) -> Value:
    """Puts the columns that a shard computes where they stand in the whole, with zeros around them.

    Args:
        model: The graph.
        node: Computes them, and nothing else.
        begin: The first one.
        end: Behind the last one.
        width: Of the whole.
        rank: Of what it computes; columns are its last dimension.

    Returns:
        What all who read the columns now read: the sum over all shards is the whole.
    """
    found = node.outputs[0]
    pads = np.zeros(2 * rank, np.int64)
    pads[rank - 1], pads[-1] = begin, width - end
    padded = onnx_ir.node("Pad", [found, add_weight(model, f"{found.name}_pads", pads)], name=f"{node.name}_padded")
    result = insert_behind(model, found, padded, "_columns")
    found.shape = None if found.shape is None else onnx_ir.Shape([*list(found.shape)[:-1], end - begin])
    return result
