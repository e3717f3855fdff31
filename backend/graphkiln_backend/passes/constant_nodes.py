"""Nodes that compute from weights alone, such as those that dequantize them: each reader has its own, right before it.

Quantizers write all of them in front of a graph. A cut behind them would hand weights from stage to stage, dequantized,
with every batch, and leave the first stage with the weights of all.
"""

from __future__ import annotations

from collections.abc import Iterator

import onnx_ir

from graphkiln_backend.repository.onnx_file import DRAWING


def bring_to_readers(model: onnx_ir.Model) -> None:
    """Puts a copy of each node that computes from weights alone before each node that reads it, in place.

    Args:
        model: The graph, its nodes in an order in which they can be computed.
    """
    for node in reversed(find_constant_nodes(model)):
        for number, reader in enumerate(_readers(node)):
            own = _copy(node, number)
            model.graph.insert_before(reader, own)
            _read_from(reader, node, own)
        model.graph.remove(node, safe=True)


def find_constant_nodes(model: onnx_ir.Model) -> list[onnx_ir.Node]:
    """The nodes that compute the same in every run, and whose outputs other nodes of the main graph alone read.

    Args:
        model: The graph, its nodes in an order in which they can be computed.
    """
    found: dict[onnx_ir.Node, None] = {}
    for node in model.graph:
        if all(value is None or value.is_initializer() or value.producer() in found for value in node.inputs):
            found |= {node: None} if _may_move(node, model.graph) else {}
    return list(found)


def _may_move(node: onnx_ir.Node, graph: onnx_ir.Graph) -> bool:
    """Whether a node draws no numbers, holds no graph, and is read by nodes of the main graph alone."""
    holds = any(_is_graph(attribute) for attribute in node.attributes.values())
    read = not any(value.is_graph_output() for value in node.outputs)
    return not holds and read and node.op_type not in DRAWING and all(user.graph is graph for user in _readers(node))


def _is_graph(attribute: onnx_ir.Attr) -> bool:
    return attribute.type in (onnx_ir.AttributeType.GRAPH, onnx_ir.AttributeType.GRAPHS)


def _readers(node: onnx_ir.Node) -> Iterator[onnx_ir.Node]:
    """The nodes that read what a node computes, each once."""
    return iter(dict.fromkeys(user for value in node.outputs for user, _ in value.uses()))


def _copy(node: onnx_ir.Node, number: int) -> onnx_ir.Node:
    """A node like another one; the first has its names, the others have names of their own."""
    suffix = f"_again{number}" if number else ""
    own = onnx_ir.Node(
        node.domain,
        node.op_type,
        node.inputs,
        list(node.attributes.values()),
        overload=node.overload,
        num_outputs=len(node.outputs),
        version=node.version,
        name=f"{node.name}{suffix}" if node.name else None,
    )
    for value, made in zip(node.outputs, own.outputs, strict=True):
        made.name, made.shape, made.type = f"{value.name}{suffix}" if value.name else "", value.shape, value.type
    return own


def _read_from(reader: onnx_ir.Node, node: onnx_ir.Node, own: onnx_ir.Node) -> None:
    """Has a node read what a copy computes."""
    copies = dict(zip(node.outputs, own.outputs, strict=True))
    for number, value in enumerate(reader.inputs):
        if value in copies:
            reader.replace_input_with(number, copies[value])
