"""What exporters write beside a graph, and no runtime reads: where each node comes from, with paths of a machine."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import onnx_ir


def remove_export_notes(model: onnx_ir.Model) -> None:
    """Removes stack traces, names of scopes and doc strings of everything in a graph, in place.

    What is said of the model as a whole, such as its author and license, stays: its owner wrote it.
    """
    for noted in _parts(model):
        noted.metadata_props.clear()
        noted.doc_string = None
    for value in model.graph.initializers.values():
        if value.const_value is not None:
            value.const_value = _without_notes(value.const_value)
    for node in _nodes(model):
        for attribute in [*node.attributes.values()]:
            _clear_attribute(node, attribute)


def _nodes(model: onnx_ir.Model) -> Iterator[onnx_ir.Node]:
    yield from model.graph.all_nodes()
    for function in model.functions.values():
        yield from function.all_nodes()


def _parts(model: onnx_ir.Model) -> Iterator[Any]:
    """Graphs, functions, nodes and values."""
    yield from model.functions.values()
    for graph in model.graphs():
        yield graph
        yield from (*graph.inputs, *graph.initializers.values())
    for node in _nodes(model):
        yield node
        yield from node.outputs


def _clear_attribute(node: onnx_ir.Node, attribute: Any) -> None:
    attribute.doc_string = None
    if attribute.type == onnx_ir.AttributeType.TENSOR and not attribute.is_ref():
        clean = _without_notes(attribute.value)
        if clean is not attribute.value:
            node.attributes[attribute.name] = onnx_ir.AttrTensor(attribute.name, clean)


def _without_notes(tensor: Any) -> Any:
    """A tensor without a text beside it; that of a file cannot be changed, and is replaced."""
    tensor.metadata_props.clear()
    if not tensor.doc_string:
        return tensor
    return onnx_ir.Tensor(tensor.numpy(), dtype=tensor.dtype, name=tensor.name)
