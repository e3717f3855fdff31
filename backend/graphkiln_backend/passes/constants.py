"""Constant nodes beside their readers, and weight sharing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import onnx_ir
from onnx_ir.passes.common import DeduplicateInitializersPass

from graphkiln_backend.passes.base import Pass
from graphkiln_backend.passes.edge import Edge
from graphkiln_backend.repository.training_mode import DRAWING

# Quantizers put all nodes that dequantize weights at the start of a graph. Cut into stages as it is, such a graph would
# keep all weights in the first stage and send dequantized ones on with every batch. Each reader gets its own copy of
# these nodes, directly before it.


def bring_to_readers(model: onnx_ir.Model) -> None:
    """Copy nodes that depend on weights alone to directly before each reader, in place.

    Args:
        model: A topologically sorted graph.
    """
    constant = {node: number for number, node in enumerate(find_constant_nodes(model))}
    taken = Counter[onnx_ir.Node]()
    for reader in [node for node in model.graph if node not in constant]:
        copies: dict[onnx_ir.Value, onnx_ir.Value] = {}
        for node in sorted(_needed(reader, constant), key=constant.__getitem__):
            own = _copy(node, copies, taken[node])
            model.graph.insert_before(reader, own)
            copies |= zip(node.outputs, own.outputs, strict=True)
            taken[node] += 1
        for number, value in enumerate(reader.inputs):
            if value is not None and value in copies:
                reader.replace_input_with(number, copies[value])
    model.graph.remove(constant, safe=True)


def find_constant_nodes(model: onnx_ir.Model) -> list[onnx_ir.Node]:
    """Return the constant nodes whose outputs are read only by nodes of the main graph.

    Args:
        model: A topologically sorted graph.
    """
    found: dict[onnx_ir.Node, None] = {}
    for node in model.graph:
        given = (value is None or value.is_initializer() or value.producer() in found for value in node.inputs)
        if all(given) and _may_move(node, model.graph):
            found[node] = None
    return list(found)


def _may_move(node: onnx_ir.Node, graph: onnx_ir.Graph) -> bool:
    """Return True for a deterministic node without subgraphs that only nodes of the main graph read."""
    graphs = (onnx_ir.AttributeType.GRAPH, onnx_ir.AttributeType.GRAPHS)
    holds = any(attribute.type in graphs for attribute in node.attributes.values())
    users = (user.graph for value in node.outputs for user, _ in value.uses())
    read = all(user is graph for user in users) and not any(value.is_graph_output() for value in node.outputs)
    return read and not holds and node.op_type not in DRAWING | {"Dropout"}


def _needed(reader: onnx_ir.Node, constant: Mapping[onnx_ir.Node, int]) -> set[onnx_ir.Node]:
    """Return the constant nodes upstream of a node."""
    found, waiting = set[onnx_ir.Node](), [reader]
    while waiting:
        new = set(_constant_inputs(waiting.pop(), constant)) - found
        found |= new
        waiting += new
    return found


def _constant_inputs(node: onnx_ir.Node, constant: Mapping[onnx_ir.Node, int]) -> Iterator[onnx_ir.Node]:
    producers = (value.producer() for value in node.inputs if value is not None)
    yield from (producer for producer in producers if producer is not None and producer in constant)


def _copy(node: onnx_ir.Node, copies: Mapping[onnx_ir.Value, onnx_ir.Value], number: int) -> onnx_ir.Node:
    """Copy a node; the first copy keeps the names, later ones get a suffix."""
    suffix = f"_again{number}" if number else ""
    own = onnx_ir.Node(
        node.domain,
        node.op_type,
        [copies.get(value, value) if value is not None else None for value in node.inputs],
        list(node.attributes.values()),
        overload=node.overload,
        num_outputs=len(node.outputs),
        version=node.version,
        name=f"{node.name}{suffix}" if node.name else None,
    )
    for value, made in zip(node.outputs, own.outputs, strict=True):
        made.name, made.shape, made.type = f"{value.name}{suffix}" if value.name else "", value.shape, value.type
    return own


@dataclass(frozen=True)
class ShareWeights(Pass):
    """Deduplicate equal weights. Runs after the folds, which cannot change a weight with several readers."""

    name = "share-weights"
    summary = "equal weights are kept once"

    def why_skip(self, model: onnx_ir.Model) -> str:
        """Skip a graph without weights."""
        return "" if model.graph.initializers else "no weights"

    def __call__(self, model: onnx_ir.Model) -> Edge:
        """Compare weights of the same shape and type."""
        DeduplicateInitializersPass()(model)
        return Edge()
