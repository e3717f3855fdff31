"""What the nodes of a graph leave to their defaults."""

from __future__ import annotations

import onnx
import onnx_ir


def find_attribute(node: onnx_ir.Node, name: str, opset: int) -> onnx_ir.Attr | None:
    """An attribute of a node, or the default that ONNX gives it; None where it has neither.

    Args:
        node: Of ONNX's own operators.
        name: Of the attribute.
        opset: Version of ONNX's operators that the graph is written in.
    """
    if name in node.attributes:
        return node.attributes[name]
    known = onnx.defs.get_schema(node.op_type, opset).attributes
    default = known[name].default_value if name in known else None
    return onnx_ir.from_proto(default) if default is not None and default.type else None
