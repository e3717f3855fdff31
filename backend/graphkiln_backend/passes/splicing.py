"""Insertion of nodes after inputs, before outputs and after inner values, without changing names."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

import onnx_ir


def inner_values(graph: onnx_ir.Graph) -> Iterator[onnx_ir.Value]:
    """Yield every named value of a graph and its subgraphs but the graph's own inputs."""
    yield from graph.initializers.values()
    for part in graph.subgraphs():
        yield from (*part.inputs, *part.initializers.values())
    for node in graph.all_nodes():
        yield from node.outputs


def free_name(graph: onnx_ir.Graph, wanted: str, taken: Collection[str] = ()) -> str:
    """Return a name that no value has: a user's own names may be like those of inserted nodes."""
    known = {*taken, *(value.name for value in (*graph.inputs, *inner_values(graph)))}
    while wanted in known:
        wanted = f"{wanted}_"
    return wanted


def prepend(
    model: onnx_ir.Model,
    value: onnx_ir.Value,
    op_type: str,
    attributes: Mapping[str, Any],
    *,
    shape: onnx_ir.Shape | None,
    dtype: onnx_ir.DataType | None = None,
) -> onnx_ir.Node:
    """Insert a node between an input of the graph and its readers; the input keeps its name.

    Args:
        model: The graph.
        value: The input.
        op_type: Operator type of the node.
        attributes: Attributes of the node.
        shape: New shape of the input.
        dtype: New element type of the input, or None to keep it.
    """
    name = value.name
    fresh = onnx_ir.Value(name=name, shape=shape, type=onnx_ir.TensorType(dtype) if dtype else value.type)
    node = onnx_ir.node(op_type, [fresh], attributes)
    result = node.outputs[0]
    result.name = free_name(model.graph, f"{name}_{op_type.lower()}")
    result.shape, result.type = value.shape, value.type
    onnx_ir.convenience.replace_all_uses_with(value, result)
    position = list(model.graph.inputs).index(value)
    value.name = free_name(model.graph, f"{name}_before")
    model.graph.inputs[position] = fresh
    model.graph.insert_before(model.graph[0], node)
    return node


def append(
    model: onnx_ir.Model,
    value: onnx_ir.Value,
    op_type: str,
    attributes: Mapping[str, Any],
    *,
    shape: onnx_ir.Shape | None,
    constants: list[onnx_ir.Value] | None = None,
    outputs: int = 1,
) -> onnx_ir.Node:
    """Insert a node before an output of the graph; the node's first result becomes the output and keeps its name.

    Args:
        model: The graph.
        value: The output.
        op_type: Operator type of the node.
        attributes: Attributes of the node.
        shape: New shape of the output.
        constants: Further inputs of the node.
        outputs: Number of results of the node.
    """
    name = value.name
    position = list(model.graph.outputs).index(value)
    node = onnx_ir.node(op_type, [value, *(constants or [])], attributes, num_outputs=outputs)
    result = node.outputs[0]
    value.name = free_name(model.graph, f"{name}_before_{op_type.lower()}")
    result.name, result.shape, result.type = name, shape, value.type
    model.graph.append(node)
    model.graph.outputs[position] = result
    return node


def insert_behind(model: onnx_ir.Model, value: onnx_ir.Value, node: onnx_ir.Node, suffix: str) -> onnx_ir.Value:
    """Insert a node after a value; its first result takes over the value's name, readers and place among outputs.

    Args:
        model: The graph.
        value: A computed value; the suffix is appended to its name.
        node: A node that reads the value and is not in a graph yet.
        suffix: Suffix of the value's new name.

    Returns:
        The first result of the node, with the value's shape and type.
    """
    result = node.outputs[0]
    result.name, result.shape, result.type = value.name, value.shape, value.type
    value.name = f"{value.name}{suffix}"
    model.graph.insert_after(value.producer(), node)  # type: ignore[arg-type]
    for user, number in list(value.uses()):
        if user is not node:
            user.replace_input_with(number, result)
    for position, output in enumerate(model.graph.outputs):
        if output is value:
            model.graph.outputs[position] = result
    return result
