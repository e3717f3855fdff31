"""Engines by name, found through the entry-point group `graphkiln.engines`; third parties take the same path."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import entry_points
from pathlib import Path

from graphkiln_backend.engines.base import Engine, Session, Support
from graphkiln_backend.graph.device import Device
from graphkiln_backend.graph.errors import EngineUnavailable
from graphkiln_backend.graph.spelling import did_you_mean

GROUP = "graphkiln.engines"
REFERENCE_ENGINE = "onnxruntime"
"""The engine that says what a saved graph computes."""

_EXTRAS = {"onnxruntime": "serve", "openvino": "openvino", "tensorrt": "gpu"}


def engine_names() -> list[str]:
    """Names of all registered engines, installed or not."""
    return sorted(entry.name for entry in entry_points(group=GROUP))


def load_engine(name: str) -> Engine:
    """Imports an engine.

    Raises:
        EngineUnavailable: No engine has that name, or its runtime is not installed (the error names the extra).
    """
    for entry in entry_points(group=GROUP, name=name):
        try:
            engine: Engine = entry.load()()
        except ImportError as error:
            raise EngineUnavailable(
                f"engine '{name}' is known but its runtime is not installed: {error}", extra=_EXTRAS.get(name)
            ) from error
        return engine
    raise EngineUnavailable(f"unknown engine '{name}'", hint=did_you_mean(name, engine_names()))


def probe(name: str, device: Device) -> Support:
    """Whether an engine is known, installed, and can run on a device."""
    try:
        return load_engine(name).probe(device)
    except EngineUnavailable as error:
        return Support(ok=False, reason=str(error))


def open_reference(graph_path: Path, op_libraries: Sequence[str] = ()) -> Session:
    """A saved graph as the reference of the numeric policy runs it: on the CPU, every graph optimization off.

    Args:
        graph_path: The graph.
        op_libraries: Libraries of custom operators.

    Raises:
        LoweringError: ONNX Runtime refuses the graph.
    """
    from graphkiln_backend.engines.onnxruntime import OnnxRuntimeEngine  # most starts need no reference

    return OnnxRuntimeEngine().build_reference(graph_path, op_libraries)
