"""Make graphs run in ONNX Runtime on any CPU: no export notes, current opset, nodes with kernels."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import onnx_ir
from onnxscript import version_converter

from graphkiln_backend.engines.onnxruntime import OnnxRuntimeEngine
from graphkiln_backend.graph.errors import LoweringError
from graphkiln_backend.passes.graph_file import OPSET, save
from graphkiln_backend.passes.rounding import compute_in_fp32, forget_types, infer_types

_MISSING = re.compile(r"Could not find an implementation for (?P<operator>\w+)\(")
_HALVES = {onnx_ir.DataType.BFLOAT16: "bf16", onnx_ir.DataType.FLOAT16: "fp16"}
_MOST_OPERATORS = 100


def save_runnable(model: onnx_ir.Model, target: Path) -> tuple[str, ...]:
    """Write a graph without export notes; nodes without a kernel in ONNX Runtime compute in fp32, between casts.

    Returns:
        Remarks for the user: nodes that compute in another type.
    """
    remove_export_notes(model)
    save(model, target)
    types = _types(model)
    if not types & {*_HALVES, onnx_ir.DataType.DOUBLE} or not _problem(target):
        return ()
    guessed = infer_types(model)
    notes = [
        f"{count} nodes in {name} compute in fp32, between casts: ONNX Runtime has no such kernels for CPUs"
        for dtype, name in _HALVES.items()
        if dtype in types and (count := compute_in_fp32(model, dtype))
    ]
    forget_types(value for value in guessed if (node := value.producer()) is not None and node.domain)
    save(model, target)
    notes += _without_double(model, target)
    return () if _problem(target) else tuple(notes)


def _without_double(model: onnx_ir.Model, target: Path) -> list[str]:
    """Move fp64 nodes without a kernel to fp32, operator by operator."""
    found: list[str] = []
    for _ in range(_MOST_OPERATORS):
        missing = _MISSING.search(_problem(target))
        if missing is None or not compute_in_fp32(model, onnx_ir.DataType.DOUBLE, {missing["operator"]}):
            break
        found.append(missing["operator"])
        save(model, target)
    listed = ", ".join(found)
    return [f"{listed} compute in fp32, between casts: ONNX Runtime has no fp64 kernels of them"] if found else []


def _problem(graph: Path) -> str:
    """Error of ONNX Runtime for a graph; empty if it runs."""
    try:
        OnnxRuntimeEngine().build_reference(graph).close()
    except LoweringError as error:
        return str(error)
    return ""


def _types(model: onnx_ir.Model) -> set[onnx_ir.DataType | None]:
    weights = (value.dtype for value in model.graph.initializers.values())
    cast = (
        onnx_ir.DataType(node.attributes["to"].as_int())
        for node in model.graph.all_nodes()
        if node.op_type == "Cast" and "to" in node.attributes
    )
    values = (value.dtype for node in model.graph.all_nodes() for value in node.outputs)
    return {*weights, *cast, *values, *(value.dtype for value in model.graph.inputs)}


# Notes of exporters, unused by runtimes: the origin of each node, with local paths.


def remove_export_notes(model: onnx_ir.Model) -> None:
    """Remove stack traces, names of scopes and doc strings of everything in a graph, in place.

    Metadata of the model, such as author and license, stays.
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
    """Yield graphs, functions, nodes and values."""
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
    """Remove the text of a tensor; an external tensor is replaced, because it cannot be changed."""
    tensor.metadata_props.clear()
    if not tensor.doc_string:
        return tensor
    return onnx_ir.Tensor(tensor.numpy(), dtype=tensor.dtype, name=tensor.name)


# Old operator sets: graphs are converted to the opset of the converters.

# Opset since which Resize has a coordinate mode. Before, and in Upsample, it is `asymmetric` in ONNX's reference and
# ONNX Runtime; the version converter wrongly leaves the new default, `half_pixel`.
_RESIZE_SINCE = 11
# Opset since which Scan has no batch.
_SCAN_SINCE = 9


def raise_opset(model: onnx_ir.Model) -> None:
    """Convert a graph to the current opset in place, if the version converter supports it."""
    version = model.opset_imports.get("") or OPSET
    # The version converter misreads scans with a batch and lengths.
    if version >= OPSET or (version < _SCAN_SINCE and any(each.op_type == "Scan" for each in model.graph.all_nodes())):
        return
    rounding = ["ceil" if _shrinks(node) else "floor" for node in _resizes(model)] if version < _RESIZE_SINCE else []
    version_converter.convert_version(model, OPSET, fallback=True)
    for node, nearest in zip(_resizes(model), rounding, strict=False):  # same order, maybe other names
        for name, mode in (("coordinate_transformation_mode", "asymmetric"), ("nearest_mode", nearest)):
            node.attributes[name] = onnx_ir.AttrString(name, mode)


def _resizes(model: onnx_ir.Model) -> Iterator[onnx_ir.Node]:
    return (node for node in model.graph.all_nodes() if node.op_type in ("Resize", "Upsample") and not node.domain)


def _shrinks(node: onnx_ir.Node) -> bool:
    if "scales" in node.attributes:
        return min(node.attributes["scales"].as_floats()) < 1
    scales = onnx_ir.convenience.get_const_tensor(node.inputs[1]) if len(node.inputs) > 1 and node.inputs[1] else None
    return scales is not None and bool((scales.numpy() < 1).any())
