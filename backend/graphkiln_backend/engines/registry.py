"""Registry of engines: built-in ones, and third-party ones in the entry-point group `graphkiln.engines`.

Built-in engines are entry points as well, but are loaded without searching the installed packages, which takes 20 to 40
ms of CPU time in every instance process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path

from graphkiln_backend.engines.base import Engine, Session, SessionConfig, Support
from graphkiln_backend.graph.device import CPU, Device
from graphkiln_backend.graph.errors import EngineUnavailable
from graphkiln_backend.graph.text import did_you_mean
from graphkiln_backend.repository.openvino_ir import is_ir

GROUP = "graphkiln.engines"
REFERENCE_ENGINE = "onnxruntime"  # its outputs are the reference for a saved graph in ONNX

# As in pyproject.toml.
BUILT_IN = {
    "onnxruntime": "graphkiln_backend.engines.onnxruntime:OnnxRuntimeEngine",
    "openvino": "graphkiln_backend.engines.openvino:OpenVinoEngine",
    "tensorrt": "graphkiln_backend.engines.tensorrt:TensorRtEngine",
}
_EXTRAS = {"onnxruntime": "serve", "openvino": "openvino", "tensorrt": "gpu"}


def engine_names() -> list[str]:
    """Return the names of all registered engines, installed or not."""
    from importlib.metadata import entry_points

    return sorted({*BUILT_IN, *(entry.name for entry in entry_points(group=GROUP))})


def load_engine(name: str) -> Engine:
    """Import an engine.

    Raises:
        EngineUnavailable: The name is unknown, or the runtime is not installed (the error names the extra).
    """
    for load in _find(name):
        try:
            engine = load()()
        except ImportError as error:
            raise EngineUnavailable(
                f"engine '{name}' is known but its runtime is not installed: {error}", extra=_EXTRAS.get(name)
            ) from error
        return engine
    raise EngineUnavailable(f"unknown engine '{name}'", hint=did_you_mean(name, engine_names()))


def _find(name: str) -> Iterator[Callable[[], Callable[[], Engine]]]:
    if name in BUILT_IN:
        yield partial(_import, BUILT_IN[name])
        return
    from importlib.metadata import entry_points

    for entry in entry_points(group=GROUP, name=name):
        yield entry.load


def _import(place: str) -> Callable[[], Engine]:
    module, _, name = place.partition(":")
    engine: Callable[[], Engine] = getattr(import_module(module), name)
    return engine


def probe(name: str, device: Device) -> Support:
    """Check that an engine is installed and can run on a device."""
    try:
        return load_engine(name).probe(device)
    except EngineUnavailable as error:
        return Support(ok=False, reason=str(error))


def reference_engine(graph_path: Path) -> str:
    """Return the engine whose outputs are the reference for a saved graph."""
    return "openvino" if is_ir(graph_path) else REFERENCE_ENGINE


def open_reference(graph_path: Path, op_libraries: Sequence[str] = ()) -> Session:
    """Open a saved graph as the reference of the numeric policy: on the CPU, with all graph optimizations off.

    For a graph in OpenVINO IR it is OpenVINO, which alone reads it and always optimizes, in the precision of the graph.

    Args:
        graph_path: The graph.
        op_libraries: Libraries of custom operators.

    Raises:
        LoweringError: The engine refuses the graph.
        EngineUnavailable: OpenVINO is not installed.
    """
    if is_ir(graph_path):
        config = SessionConfig(engine="openvino", device=CPU, threads=1, spin=False, reason="the reference")
        return load_engine("openvino").build(graph_path, config)
    from graphkiln_backend.engines.onnxruntime import OnnxRuntimeEngine  # not needed by most starts

    return OnnxRuntimeEngine().build_reference(graph_path, op_libraries)
