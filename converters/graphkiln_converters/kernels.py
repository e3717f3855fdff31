"""Saves graphs so that ONNX Runtime can run them on any CPU, also those of types that it has few kernels for."""

from __future__ import annotations

import re
from pathlib import Path

import onnx_ir

from graphkiln_backend.engines.onnxruntime import OnnxRuntimeEngine
from graphkiln_backend.graph.errors import LoweringError
from graphkiln_backend.passes.emulation import compute_in_fp32, forget_types, infer_types
from graphkiln_backend.passes.graph_file import save
from graphkiln_converters.export_notes import remove_export_notes

_MISSING = re.compile(r"Could not find an implementation for (?P<operator>\w+)\(")
_HALVES = {onnx_ir.DataType.BFLOAT16: "bf16", onnx_ir.DataType.FLOAT16: "fp16"}
_MOST_OPERATORS = 100


def save_runnable(model: onnx_ir.Model, target: Path) -> tuple[str, ...]:
    """Writes a graph without export notes; nodes that ONNX Runtime has no kernel for compute in fp32, between casts.

    Args:
        model: The graph; changed in place where nodes must change. What cannot be helped is left to its first session.
        target: The file.

    Returns:
        What a person should know of it: which nodes compute in another type than they were saved in.
    """
    remove_export_notes(model)
    save(model, target)
    types = _types(model)
    if not types & {*_HALVES, onnx_ir.DataType.DOUBLE} or not _problem(target):
        return ()
    guessed = infer_types(model)
    notes = [
        f"{count} nodes in {name} compute in fp32, between casts: ONNX Runtime has no kernels of their own for CPUs"
        for dtype, name in _HALVES.items()
        if dtype in types and (count := compute_in_fp32(model, dtype))
    ]
    forget_types(value for value in guessed if (node := value.producer()) is not None and node.domain)
    save(model, target)
    notes += _without_double(model, target)
    return () if _problem(target) else tuple(notes)


def _without_double(model: onnx_ir.Model, target: Path) -> list[str]:
    """Lets those nodes of fp64 compute in fp32 that have no kernel, operator by operator."""
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
    """Why ONNX Runtime does not run a graph, or empty."""
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
