"""ONNX Runtime: the reference engine, on the CPU or on CUDA.

The one home of `import onnxruntime` (with `tensorrt.py`, which reaches TensorRT through it). Providers are named
explicitly and read back after the build, because ONNX Runtime replaces a provider that it cannot start with the CPU and
says nothing.
"""

from __future__ import annotations

import ctypes
import json
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self, cast

import numpy as np
import onnxruntime
from onnxruntime.capi import onnxruntime_pybind11_state as native

from graphkiln_backend.engines.base import GraphLevel, Placement, SessionConfig, Support
from graphkiln_backend.engines.cuda_graphs import NOT_RECORDED, CapturedRuns
from graphkiln_backend.engines.hardware import gpu
from graphkiln_backend.engines.profile import read_placement
from graphkiln_backend.engines.shared_weights import WEIGHTS, SharedWeights
from graphkiln_backend.graph.device import Device
from graphkiln_backend.graph.dtypes import AnyArray, DType
from graphkiln_backend.graph.errors import EngineUnavailable, ExecutionError, LoweringError, SignatureError
from graphkiln_backend.graph.precision import Precision
from graphkiln_backend.graph.signature import Signature, TensorSpec, free_dim

# ONNX Runtime 1.31 for Linux reports usage to its vendor unless told not to: a model server must not.
onnxruntime.disable_telemetry_events()

_LEVELS = {
    "all": onnxruntime.GraphOptimizationLevel.ORT_ENABLE_ALL,
    "extended": onnxruntime.GraphOptimizationLevel.ORT_ENABLE_EXTENDED,
    "basic": onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC,
    "off": onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL,
}
CPU, CUDA = "CPUExecutionProvider", "CUDAExecutionProvider"
_ERRORS = (
    native.EngineError,
    native.EPFail,
    native.Fail,
    native.InvalidArgument,
    native.InvalidGraph,
    native.InvalidProtobuf,
    native.NoSuchFile,
    native.NotImplemented,
    native.RuntimeException,
    RuntimeError,
    ValueError,
)
Provider = tuple[str, dict[str, str]]
_COMPILED = "optimised.onnx"
_ONNX_BF16 = 16
"""Source: `onnx.TensorProto.BFLOAT16`."""


class OnnxRuntimeEngine:
    """ONNX Runtime on the CPU or on CUDA."""

    def probe(self, device: Device) -> Support:
        """Says yes to the CPU, and to a GPU that is there and that this build of ONNX Runtime has a provider for."""
        return gpu_support(CUDA, device) if device.is_gpu else Support(ok=True)

    def identity(self, step: SessionConfig) -> Mapping[str, str]:
        """See `engines.base.Engine.identity`. Only optimized graphs for the CPU are kept."""
        if step.device.is_gpu or step.tuning.graph_level == "off":
            return {}
        return {"onnxruntime": onnxruntime.__version__, "tuning": str(step.tuning)}

    def compile(self, graph_path: Path, step: SessionConfig, folder: Path) -> None:
        """Writes the optimized graph, its weights beside it so that they are mapped and not copied.

        At most at the level `extended`: what comes after it is made for one processor, and done at load.

        Raises:
            LoweringError: As `build`.
        """
        options = session_options(replace(step, tuning=replace(step.tuning, graph_level=_kept_level(step))))
        _save_optimized(graph_path, options, folder / _COMPILED)

    def build(self, graph_path: Path, step: SessionConfig, compiled: Path | None = None) -> OnnxRuntimeSession:
        """Loads a graph with the step's threads.

        Raises:
            LoweringError: ONNX Runtime refuses the file (damaged, unknown operator, newer opset), or moved the
                graph to another provider than the one asked for.
        """
        source = compiled / _COMPILED if compiled else graph_path
        options = session_options(step)
        provider = cpu_or_cuda(step)
        shrink = step.tuning.arena_shrinkage
        if not step.shared_folder or step.device.is_gpu:
            recorded = step.options.get("enable_cuda_graph") == "1"
            captured = partial(CapturedRuns, device_id=int(provider[1]["device_id"])) if recorded else None
            return load(source, options, [provider], shrink=shrink, captured=captured)
        shared = _share(step.shared_folder, source, step)
        options.graph_optimization_level = _LEVELS["off"]  # the shared copy is optimized already
        return load(shared.path, options, [provider], shrink=shrink, on_close=shared.close)

    def build_reference(self, graph_path: Path) -> OnnxRuntimeSession:
        """Loads a graph as the reference of the numeric policy: CPU, every graph optimization off.

        Raises:
            LoweringError: As `build`.
        """
        options = onnxruntime.SessionOptions()
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
        return load(graph_path, options, [(CPU, {})])


class OnnxRuntimeSession:
    """A loaded graph; see `engines.base.Session`."""

    def __init__(
        self,
        session: onnxruntime.InferenceSession,
        *,
        shrink: str,
        profiled: Callable[[Path], onnxruntime.InferenceSession],
        on_close: Callable[[], None],
        captured: Callable[[onnxruntime.InferenceSession], CapturedRuns] | None,
        fused: Mapping[str, int],
    ) -> None:
        self._fused = fused
        self._session = session
        self._captured = captured(session) if captured else None
        self._profiled = profiled
        self._on_close = on_close
        self._run_options = _run_options(shrink)
        if captured:  # runs beside the recorded ones, for the profile
            self._run_options.add_run_config_entry("gpu_graph_id", NOT_RECORDED)
        self._signature = Signature(
            inputs=tuple(_spec(node) for node in session.get_inputs()),
            outputs=tuple(_spec(node) for node in session.get_outputs()),
            optional_inputs=tuple(_spec(node) for node in session.get_overridable_initializers()),
        )
        self._has_bf16 = any(spec.dtype is DType.BF16 for spec in (*self._signature.inputs, *self._signature.outputs))
        self._has_strings = any(spec.dtype is DType.BYTES for spec in self._signature.inputs)
        self._outputs = [spec.name for spec in self._signature.outputs]

    @property
    def signature(self) -> Signature:
        """Inputs and outputs as ONNX Runtime sees them."""
        return self._signature

    def run(self, feeds: Mapping[str, AnyArray], outputs: Sequence[str] | None = None) -> dict[str, AnyArray]:
        """Computes outputs; see `engines.base.Session.run`."""
        return self._run(self._session, feeds, outputs)

    def _run(
        self, session: onnxruntime.InferenceSession, feeds: Mapping[str, AnyArray], outputs: Sequence[str] | None
    ) -> dict[str, AnyArray]:
        names = self._outputs if outputs is None else outputs
        if self._has_strings:
            feeds = {name: _as_text(name, array) for name, array in feeds.items()}
        try:
            if self._captured and session is self._session and not (self._has_bf16 or self._has_strings):
                return self._captured.run(feeds, names)
            run = partial(_run_values, session) if self._has_bf16 else session.run
            return dict(zip(names, run(names, feeds, self._run_options), strict=True))
        except native.InvalidArgument as error:
            raise SignatureError(
                "ONNX Runtime refuses the input",
                expected=", ".join(map(str, self._signature.inputs)),
                got=str(error),
            ) from error
        except _ERRORS as error:
            raise ExecutionError(f"ONNX Runtime failed: {error}") from error

    def placement(self, feeds: Mapping[str, AnyArray]) -> Placement:
        """Runs the feeds under ONNX Runtime's profiler and counts the kernels that ran.

        In a session of its own, which lives as long as that: one that was ever profiled loses 40 bytes at each later
        run (seen with ONNX Runtime 1.31).
        """
        with tempfile.TemporaryDirectory(prefix="graphkiln-profile-") as folder:
            session = self._profiled(Path(folder) / "profile")
            try:
                self._run(session, feeds, None)
            finally:
                profile = Path(session.end_profiling())
            events = json.loads(profile.read_bytes())
        asked = self._session.get_providers()[0]
        kernels = [event for event in events if event.get("cat") == "Node" and "args" in event]
        return read_placement(kernels, asked, self._fused)

    def close(self) -> None:
        """Drops the runtime's session."""
        del self._session, self._profiled, self._captured
        self._on_close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def gpu_support(provider: str, device: Device) -> Support:
    """Whether this build of ONNX Runtime has a provider, and the machine the GPU."""
    if provider not in onnxruntime.get_available_providers():
        return Support(
            ok=False,
            reason=f"this build of ONNX Runtime has no {provider} "
            "(pip uninstall onnxruntime, then pip install 'graphkiln[gpu]')",
        )
    try:
        gpu(device)
    except EngineUnavailable as error:
        return Support(ok=False, reason=str(error))
    return Support(ok=True)


def session_options(step: SessionConfig) -> onnxruntime.SessionOptions:
    """ONNX Runtime's options for a step."""
    tuning = step.tuning
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = _LEVELS[tuning.graph_level]
    options.execution_mode = (
        onnxruntime.ExecutionMode.ORT_PARALLEL if tuning.parallel else onnxruntime.ExecutionMode.ORT_SEQUENTIAL
    )
    options.intra_op_num_threads = step.threads
    options.inter_op_num_threads = tuning.inter_threads or (step.threads if tuning.parallel else 1)
    options.enable_cpu_mem_arena = tuning.memory_arena
    options.enable_mem_pattern = tuning.memory_pattern
    options.add_session_config_entry("session.intra_op.allow_spinning", "1" if step.spin else "0")
    for name, value in tuning.config_entries.items():
        options.add_session_config_entry(name, value)
    return options


def _kept_level(step: SessionConfig) -> GraphLevel:
    return "extended" if step.tuning.graph_level == "all" else step.tuning.graph_level


def _save_optimized(graph_path: Path, options: onnxruntime.SessionOptions, target: Path) -> None:
    options.optimized_model_filepath = str(target)
    options.add_session_config_entry("session.optimized_model_external_initializers_file_name", WEIGHTS)
    options.add_session_config_entry("session.optimized_model_external_initializers_min_size_in_bytes", "1024")
    load(graph_path, options, [(CPU, {})]).close()


def cpu_or_cuda(step: SessionConfig) -> Provider:
    """The provider of a step, with its options.

    Source: ONNX Runtime, "CUDA Execution Provider" (configuration options).
    """
    if not step.device.is_gpu:
        return CPU, {}
    options = {"device_id": str(step.device.index), "use_tf32": str(int(step.precision is Precision.TF32))}
    if step.layout == "nhwc":
        options["prefer_nhwc"] = "1"
    if step.conv_search:
        options["cudnn_conv_algo_search"] = step.conv_search.upper()
    return CUDA, {**options, **step.options}


def _share(folder: Path, graph_path: Path, step: SessionConfig) -> SharedWeights:
    """Saves the optimized graph with its repacked weights, once for all instances.

    Raises:
        LoweringError: ONNX Runtime refuses the graph, or the copy cannot be written.
    """

    def save(path: Path) -> None:
        options = session_options(step)
        options.add_session_config_entry("session.save_external_prepacked_constant_initializers", "1")
        _save_optimized(graph_path, options, path)

    try:
        return SharedWeights(folder, graph_path, f"{onnxruntime.__version__}|{step.tuning}", save)
    except OSError as error:
        raise LoweringError(
            f"cannot share the weights of {graph_path} between instances",
            attempts=(str(error),),
            hint="make room in the temporary folder (TMPDIR), or serve one instance",
        ) from error


def load(
    graph_path: Path,
    options: onnxruntime.SessionOptions,
    providers: Sequence[Provider],
    *,
    shrink: str = "",
    on_close: Callable[[], None] = lambda: None,
    captured: Callable[[onnxruntime.InferenceSession], CapturedRuns] | None = None,
    fused: Mapping[str, int] | None = None,
) -> OnnxRuntimeSession:
    """Loads a graph file on providers, and makes sure that the first is the one that was asked for.

    Args:
        graph_path: The graph.
        options: ONNX Runtime's own.
        providers: Names and options; the first one must take the graph, the others what it leaves.
        shrink: Arenas that shrink after each run.
        on_close: Called when the session is closed, or not made.
        captured: Makes the runner for CUDA graphs, or None for plain runs.
        fused: For a provider that runs the graph as one kernel: the graph's products by element type.

    Raises:
        LoweringError: ONNX Runtime refuses the graph or chooses another provider.
    """
    options.log_severity_level = 3

    def profiled(prefix: Path) -> onnxruntime.InferenceSession:
        options.enable_profiling = True
        options.profile_file_prefix = str(prefix)
        return onnxruntime.InferenceSession(str(graph_path), options, providers=list(providers))

    try:
        session = onnxruntime.InferenceSession(str(graph_path), options, providers=list(providers))
    except _ERRORS as error:
        on_close()
        raise LoweringError(f"ONNX Runtime cannot load {graph_path}", attempts=(str(error),)) from error
    if session.get_providers()[0] != providers[0][0]:
        on_close()
        raise LoweringError(
            f"{graph_path} would run elsewhere than asked",
            attempts=(f"asked for {providers[0][0]}, ONNX Runtime chose {session.get_providers()}",),
        )
    return OnnxRuntimeSession(
        session, shrink=shrink, profiled=profiled, on_close=on_close, captured=captured, fused=fused or {}
    )


def _run_values(
    session: onnxruntime.InferenceSession, names: Sequence[str], feeds: Mapping[str, AnyArray], options: Any
) -> list[AnyArray]:
    """Runs a graph with bf16 at its edge, which ONNX Runtime's numpy binding does not know."""
    values = {name: _to_value(array) for name, array in feeds.items()}
    return list(map(_from_value, session.run_with_ort_values(names, values, options)))


def _run_options(shrink: str) -> onnxruntime.RunOptions:
    options = onnxruntime.RunOptions()
    if shrink:
        options.add_run_config_entry("memory.enable_memory_arena_shrinkage", shrink)
    return options


def _as_text(name: str, array: AnyArray) -> AnyArray:
    """ONNX Runtime's binding would take the bytes b'a' for the text "b'a'": hand it text.

    Raises:
        SignatureError: An element is not UTF-8.
    """
    if array.dtype.kind not in "OS":
        return array
    flat: list[bytes | str] = array.ravel().tolist()
    try:
        words = [word.decode() if isinstance(word, bytes) else word for word in flat]
    except UnicodeDecodeError as error:
        raise SignatureError(
            f"input '{name}' holds text that cannot be read", expected="UTF-8", got=str(error)
        ) from error
    return np.array(words, np.object_).reshape(array.shape)


def _to_value(array: AnyArray) -> onnxruntime.OrtValue:
    if array.dtype != DType.BF16.numpy:
        return onnxruntime.OrtValue.ortvalue_from_numpy(array)
    return onnxruntime.OrtValue.ortvalue_from_numpy_with_onnx_type(np.ascontiguousarray(array), _ONNX_BF16)


def _from_value(value: onnxruntime.OrtValue) -> AnyArray:
    if value.element_type() != _ONNX_BF16:
        return cast(AnyArray, value.numpy())
    array = np.empty(value.shape(), DType.BF16.numpy)
    ctypes.memmove(array.ctypes.data, value.data_ptr(), array.nbytes)
    return array


def _spec(node: Any) -> TensorSpec:
    return TensorSpec(
        name=node.name,
        dtype=DType.from_onnxruntime(node.type),
        # ONNX Runtime gives None for a dimension without a name.
        shape=tuple(free_dim(node.name, axis) if dim is None else dim for axis, dim in enumerate(node.shape)),
    )
