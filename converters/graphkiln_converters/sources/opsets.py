"""Old operator sets: graphs are rewritten with the operators of the one that converters write."""

from __future__ import annotations

from collections.abc import Iterator

import onnx_ir
from onnxscript import version_converter

from graphkiln_backend.passes.graph_file import OPSET

_RESIZE_SINCE = 11
"""Operator set since which a Resize says how it places the pixels. Before it, and in Upsample, `asymmetric` is meant:
ONNX's own reference and ONNX Runtime compute that; the converter leaves it at the new default, `half_pixel`."""
_SCAN_SINCE = 9
"""Operator set since which a Scan has no batch."""


def raise_opset(model: onnx_ir.Model) -> None:
    """Converts a graph of an older operator set, in place; one stays that no converter knows to convert."""
    version = model.opset_imports.get("") or OPSET
    if version >= OPSET or _has_batched_scans(model, version):
        return
    rounding = ["ceil" if _shrinks(node) else "floor" for node in _resizes(model)] if version < _RESIZE_SINCE else []
    version_converter.convert_version(model, OPSET, fallback=True)
    for node, nearest in zip(_resizes(model), rounding, strict=False):  # in the same order, maybe with other names
        for name, mode in (("coordinate_transformation_mode", "asymmetric"), ("nearest_mode", nearest)):
            node.attributes[name] = onnx_ir.AttrString(name, mode)


def _has_batched_scans(model: onnx_ir.Model, version: int) -> bool:
    """Whether its scans take a batch and its lengths, which the converter reads as those that have neither."""
    return version < _SCAN_SINCE and any(node.op_type == "Scan" for node in model.graph.all_nodes())


def _resizes(model: onnx_ir.Model) -> Iterator[onnx_ir.Node]:
    return (node for node in model.graph.all_nodes() if node.op_type in ("Resize", "Upsample") and not node.domain)


def _shrinks(node: onnx_ir.Node) -> bool:
    if "scales" in node.attributes:
        return min(node.attributes["scales"].as_floats()) < 1
    scales = onnx_ir.convenience.get_const_tensor(node.inputs[1]) if len(node.inputs) > 1 and node.inputs[1] else None
    return scales is not None and bool((scales.numpy() < 1).any())
