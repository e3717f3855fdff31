"""Adapter from `onnx_ir` nodes to the axis analysis in `graph.axes`."""

from __future__ import annotations

from typing import Any

import onnx_ir

from graphkiln_backend.graph import axes

_ATTRIBUTES = (onnx_ir.AttributeType.INT, onnx_ir.AttributeType.INTS, onnx_ir.AttributeType.STRING)
_LARGEST_CONSTANT = 1024  # elements; larger constants are not axes or shapes


def relate(node: onnx_ir.Node) -> axes.Relation | None:
    """Return the axis relation of a node, or None if unknown."""
    return axes.relate(describe(node)) if node.domain in ("", "ai.onnx") else None


def describe(node: onnx_ir.Node) -> axes.Node:
    """Describe a node for `graph.axes`."""
    opsets = node.graph.opset_imports if node.graph is not None else {}
    return axes.Node(
        operator=node.op_type,
        opset=opsets.get("") or opsets.get("ai.onnx") or 1,
        attributes={name: each.value for name, each in node.attributes.items() if each.type in _ATTRIBUTES},
        inputs=[sizes(value) for value in node.inputs],
        outputs=[sizes(value) for value in node.outputs],
        read_constant=lambda index: _elements(node.inputs[index]),
    )


def sizes(value: onnx_ir.Value | None) -> axes.Shape | None:
    """Return the dimensions of a tensor: integers, names, or None if unknown; `()` for an omitted input."""
    if value is None:
        return ()
    return None if value.shape is None else tuple(dim if isinstance(dim, int) else dim.value for dim in value.shape)


def _elements(value: onnx_ir.Value | None) -> list[Any] | None:
    if value is None:
        return []
    tensor = value.const_value
    return None if tensor is None or tensor.size > _LARGEST_CONSTANT else list(tensor.numpy().ravel().tolist())
