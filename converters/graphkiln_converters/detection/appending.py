"""Appends one graph to another."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import onnx_ir
from onnx_ir.passes.common import RemoveUnusedNodesPass
from onnxscript import version_converter

from graphkiln_backend.passes.graph_file import OPSET

_FIRST, _SECOND = "source/", "detection/"


def append(first: onnx_ir.Model, second: onnx_ir.Model, names: Sequence[str]) -> onnx_ir.Model:
    """A graph whose outputs another one reads; it returns then what that one returns.

    Args:
        first: Changed in place, and returned.
        second: Is taken apart.
        names: The outputs of the first, in the order of the inputs of the second.
    """
    version = first.opset_imports.get("", OPSET)
    if version > OPSET:
        version_converter.convert_version(second, version, fallback=True)
    read = {str(value.name): value for value in first.graph.outputs}
    outputs = list(second.graph.outputs)
    returned = {str(value.name) for value in outputs}
    _prefix([value for value in _values(first) if value.name in returned], _FIRST)
    _prefix([value for value in _values(second) if value.name not in returned], _SECOND)
    for value, name in zip(second.graph.inputs, names, strict=True):
        onnx_ir.convenience.replace_all_uses_with(value, read[name])
    _move(second, first)
    first.graph.outputs[:] = outputs
    RemoveUnusedNodesPass()(first)
    return first


def _values(model: onnx_ir.Model) -> Iterator[onnx_ir.Value]:
    yield from model.graph.initializers.values()
    for node in model.graph.all_nodes():
        yield from node.outputs


def _prefix(values: Sequence[onnx_ir.Value], prefix: str) -> None:
    onnx_ir.convenience.rename_values(values, [f"{prefix}{value.name}" for value in values])


def _move(source: onnx_ir.Model, target: onnx_ir.Model) -> None:
    """Nodes, weights and functions."""
    weights, nodes = list(source.graph.initializers.values()), list(source.graph)
    source.graph.outputs.clear()
    source.graph.initializers.clear()
    source.graph.remove(nodes)
    for number, node in enumerate(nodes):
        node.name = f"{_SECOND}{number}"
    for value in weights:
        target.graph.register_initializer(value)
    target.graph.extend(nodes)
    target.functions.update(source.functions)
    for domain, version in source.opset_imports.items():
        target.opset_imports.setdefault(domain, version)
