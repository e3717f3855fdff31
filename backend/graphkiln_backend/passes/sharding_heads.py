"""Cuts large products that no cut can be followed from into columns: from hidden states to the words of a vocabulary.

Each shard computes its own columns, padded with zeros to the width of all: the sum over all shards is the whole.
The columns need not divide into equal parts.
"""

from __future__ import annotations

from collections.abc import Collection

import onnx_ir

from graphkiln_backend.passes.sharding_cuts import Value, add_weight, is_weight
from graphkiln_backend.passes.sharding_tables import pad_columns

_WORTH_BYTES = 8 << 20
"""Of a product's weights: those of a smaller one are read and multiplied in less time than a sum takes."""


def cut_heads(model: onnx_ir.Model, shards: int, shard: int, cut: Collection[onnx_ir.Node] = ()) -> list[Value]:
    """Cuts the large products of a graph that stay whole, in place.

    Args:
        model: The graph.
        shards: How many there are.
        shard: Which one this is.
        cut: Nodes that are cut already.

    Returns:
        The padded columns of each, still to be summed up.
    """
    return [_cut(model, node, shards, shard) for node in list(model.graph) if node not in cut and is_head(node)]


def is_head(node: onnx_ir.Node) -> bool:
    """Whether a node multiplies with a large matrix of weights that no other node reads."""
    if node.op_type not in ("MatMul", "Gemm") or node.attributes.get_int("transA") == 1 or len(node.inputs) < 2:
        return False
    matrix, bias = node.inputs[1], node.inputs[2] if len(node.inputs) > 2 else None
    if matrix is None or matrix.const_value is None or not is_weight(matrix) or node.outputs[0].shape is None:
        return False
    large = matrix.const_value.nbytes >= _WORTH_BYTES and len(matrix.const_value.shape) == 2
    row = bias is None or (is_weight(bias) and bias.shape is not None and bias.shape.rank() == 1)
    return large and row and len(matrix.uses()) == 1


def _cut(model: onnx_ir.Model, node: onnx_ir.Node, shards: int, shard: int) -> Value:
    """Gives a product its columns and the bias of these, and pads what it computes."""
    columns = 0 if node.attributes.get_int("transB") == 1 else 1
    width = int(node.inputs[1].const_value.shape[columns])  # type: ignore[union-attr, arg-type]
    begin, end = width * shard // shards, width * (shard + 1) // shards
    for number, axis in ((1, columns), (2, 0)):
        value = node.inputs[number] if number < len(node.inputs) else None
        if value is None or value.const_value is None:
            continue
        array = value.const_value.numpy()
        if array.shape[axis] == width:  # a bias of one number is every column's
            part = array[begin:end] if axis == 0 else array[:, begin:end]
            node.replace_input_with(number, add_weight(model, f"{value.name}_columns", part))
    rank = len(node.outputs[0].shape or ())
    return pad_columns(model, node, begin, end, width=width, rank=rank)
