"""Engine of ONNX Runtime: sessions of graphs, of compiled graphs, and with shared weights."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import onnxruntime

from graphkiln_backend.engines.base import REWRITES_OFF, SessionConfig, Support
from graphkiln_backend.engines.hardware import saturates_products_of_bytes
from graphkiln_backend.engines.onnxruntime.loading import (
    CPU,
    CUDA,
    SharedWeights,
    digest,
    disable_optimizations,
    probe_gpu,
    register,
    save_optimized,
    select_provider,
    session_options,
)
from graphkiln_backend.engines.onnxruntime.plugins import build_with_plugins
from graphkiln_backend.engines.onnxruntime.session import OnnxRuntimeSession
from graphkiln_backend.graph.device import Device
from graphkiln_backend.graph.errors import LoweringError

_log = logging.getLogger("graphkiln.engines")

_COMPILED = "optimised.onnx"  # file name in existing cache entries


class OnnxRuntimeEngine:
    """ONNX Runtime on the CPU or on CUDA."""

    def probe(self, device: Device) -> Support:
        """Support the CPU, and GPUs if this build of ONNX Runtime has the CUDA provider."""
        return probe_gpu(CUDA, device) if device.is_gpu else Support(ok=True)

    def identity(self, config: SessionConfig) -> Mapping[str, str]:
        """See `engines.base.Engine.identity`. Only optimized graphs for the CPU are cached."""
        if config.device.is_gpu or config.tuning.graph_level == "off" or config.providers:
            return {}
        operators = {"operators": digest(config.op_libraries)} if config.op_libraries else {}
        sums = {"products of int8": "exact"} if saturates_products_of_bytes() else {}
        tuning = replace(config.tuning, memory_pattern=True)  # does not affect the graph; fixed in existing cache keys
        return {"onnxruntime": onnxruntime.__version__, "tuning": str(tuning), **operators, **sums}

    def compile(self, graph_path: Path, config: SessionConfig, folder: Path) -> None:
        """Write the optimized graph, with its weights in a separate file that can be memory-mapped.

        Optimizations beyond the level `extended` depend on the processor, and are done at load. A graph that ONNX
        Runtime's own rewrites break is not written: `build` loads it as saved.

        Raises:
            LoweringError: As `build`.
        """
        level = "extended" if config.tuning.graph_level == "all" else config.tuning.graph_level
        options = session_options(replace(config, tuning=replace(config.tuning, graph_level=level)))
        try:
            save_optimized(graph_path, options, folder / _COMPILED)
        except LoweringError:
            self.build(graph_path, config).close()  # or raises the error
            (folder / _COMPILED).unlink(missing_ok=True)

    def build(self, graph_path: Path, config: SessionConfig, compiled: Path | None = None) -> OnnxRuntimeSession:
        """Load a graph; without ONNX Runtime's own rewrites if they break it, which becomes a note of the session.

        Raises:
            LoweringError: ONNX Runtime refuses the file (damaged, unknown operator, newer opset), or chose another
                provider than the requested one.
            EngineUnavailable: A provider of another package cannot be used here.
        """
        if config.providers:
            return build_with_plugins(graph_path, config)
        source = compiled / _COMPILED if compiled and (compiled / _COMPILED).exists() else graph_path
        try:
            if config.shared_folder and not config.device.is_gpu:
                return _build_shared_if_possible(source, config, config.shared_folder)
            return _build_alone(source, config)
        except LoweringError as error:
            if config.tuning.graph_level == "off":
                raise
            try:
                session = self.build(graph_path, config.without_rewrites(), compiled)
            except LoweringError:
                raise error from None
            session.notes = (f"{REWRITES_OFF}: {error.attempts[0]}",)
            return session

    def build_reference(self, graph_path: Path, op_libraries: Sequence[str] = ()) -> OnnxRuntimeSession:
        """Load a graph as the reference of the numeric policy: CPU, all graph optimizations off.

        Args:
            graph_path: The graph.
            op_libraries: Libraries of custom operators.

        Raises:
            LoweringError: As `build`.
        """
        options = onnxruntime.SessionOptions()
        register(options, op_libraries)
        disable_optimizations(options)
        return OnnxRuntimeSession(graph_path, options, [(CPU, {})])


def _build_alone(graph_path: Path, config: SessionConfig) -> OnnxRuntimeSession:
    return OnnxRuntimeSession(
        graph_path,
        session_options(config),
        [select_provider(config)],
        arena_shrinkage=config.tuning.arena_shrinkage,
        cuda_graphs=config.device.is_gpu and config.options.get("enable_cuda_graph") == "1",
    )


def _build_shared_if_possible(graph_path: Path, config: SessionConfig, folder: Path) -> OnnxRuntimeSession:
    try:
        return _build_shared(graph_path, config, folder)
    except (OSError, LoweringError) as error:  # such as a full disk, which ONNX Runtime may report itself
        reason = error
    session = _build_alone(graph_path, config)
    _log.warning("the instances of %s do not share its weights, which takes more memory: %s", graph_path, reason)
    return session


def _build_shared(graph_path: Path, config: SessionConfig, folder: Path) -> OnnxRuntimeSession:
    """Load the shared copy of a graph, and write it first if it is missing."""

    def save(target: Path) -> None:
        options = session_options(config)
        options.add_session_config_entry("session.save_external_prepacked_constant_initializers", "1")
        save_optimized(graph_path, options, target)

    made_for = f"{graph_path.name}|{onnxruntime.__version__}|{config.tuning}{digest(config.op_libraries)}"
    shared = SharedWeights(folder, graph_path, made_for, save)
    options = session_options(config)
    disable_optimizations(options)  # the shared copy is optimized already
    shrinkage = config.tuning.arena_shrinkage
    return OnnxRuntimeSession(shared.path, options, [(CPU, {})], arena_shrinkage=shrinkage, owned=shared)
