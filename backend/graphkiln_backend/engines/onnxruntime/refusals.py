"""What to do about a graph that ONNX Runtime refuses to load."""

from __future__ import annotations

from pathlib import Path

from graphkiln_backend.graph.errors import RepositoryError
from graphkiln_backend.repository.onnx_reading import opset_of, read_graph

_HINTS = {
    "Failed to construct locale": "the graph changes the case of text by rules of a locale that this machine lacks: "
    "apt-get install locales && localedef -i en_US -f UTF-8 en_US.UTF-8",
    "is not a registered function/op": "if it is a custom operator, name its library in config.pbtxt: "
    'model_operations { op_library_filename: "/path/to/library.so" }',
}
_NO_KERNEL = "NOT_IMPLEMENTED"
_OLDEST = 7
"""Source: ONNX Runtime, docs/OperatorKernels.md: the CPU has no kernels for older operator sets."""


def hint_for(error: str, graph_path: Path) -> str:
    """A way out of an error of ONNX Runtime; empty where none is known."""
    known = next((hint for words, hint in _HINTS.items() if words in error), "")
    return known or (_hint_for_age(_opset(graph_path)) if _NO_KERNEL in error else "")


def _opset(graph_path: Path) -> int:
    try:
        return opset_of(read_graph(graph_path))
    except RepositoryError:
        return 0


def _hint_for_age(opset: int) -> str:
    raised = "export it again, or raise it with onnx.version_converter.convert_version(model, 18)"
    told = f"the graph is of operator set {opset}, and ONNX Runtime computes those from {_OLDEST} on: {raised}"
    return told if 0 < opset < _OLDEST else ""
