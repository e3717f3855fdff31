"""Sessions of ONNX Runtime.

Providers are named explicitly and read back after the build, because ONNX Runtime replaces a provider that it cannot
start with the CPU and says nothing; nor may it do so later, when a provider fails on a request.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import onnxruntime
from onnxruntime.capi import onnxruntime_pybind11_state as native

from graphkiln_backend.engines.base import DeviceTensor, KernelType, Placement, SessionConfig
from graphkiln_backend.engines.compute_limit import current_limit
from graphkiln_backend.engines.onnxruntime.cuda_graphs import NO_CAPTURE, CudaGraphRunner
from graphkiln_backend.engines.onnxruntime.custom_operators import register
from graphkiln_backend.engines.onnxruntime.device_runs import run_bound, why_not_on_device
from graphkiln_backend.engines.onnxruntime.prepacked import align_prepacked
from graphkiln_backend.engines.onnxruntime.profile import summarize_profile
from graphkiln_backend.engines.onnxruntime.providers import CPU, Provider
from graphkiln_backend.engines.onnxruntime.refusals import hint_for
from graphkiln_backend.engines.onnxruntime.shared_weights import WEIGHTS
from graphkiln_backend.engines.onnxruntime.signatures import signature_of
from graphkiln_backend.engines.onnxruntime.values import decode_text, run_ort_values
from graphkiln_backend.graph.closing import Closeable
from graphkiln_backend.graph.dtypes import AnyArray, DType
from graphkiln_backend.graph.errors import ExecutionError, GraphkilnError, LoweringError, SignatureError
from graphkiln_backend.graph.signature import Signature
from graphkiln_backend.repository.onnx_file import keep_inputs

_SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - where there is room when the disk is full
_LEVELS = {
    "all": onnxruntime.GraphOptimizationLevel.ORT_ENABLE_ALL,
    "extended": onnxruntime.GraphOptimizationLevel.ORT_ENABLE_EXTENDED,
    "basic": onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC,
    "off": onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL,
}
_EXACT_PRODUCTS = {"session.qdq_matmulnbits_accuracy_level": "1", "session.x64quantprecision": "1"}
"""What ONNX Runtime rounds unless told not to: activations to int8 before 4-bit weights multiply them (an error
of 1%, seen with 1.31), and sums of int8 products (up to 45%) where `hardware.saturates_products_of_bytes`."""
_SHARED_BYTES = "Attempt to replace the existing tensor"
"""What ONNX Runtime says of a graph that `unshare_bytes` is for."""
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


class OnnxRuntimeSession(Closeable):
    """A loaded graph; see `engines.base.Session`.

    Args:
        graph_path: The graph.
        options: ONNX Runtime's session options.
        providers: Names and options; the first one must take the graph, the others what it leaves.
        arena_shrinkage: Devices whose memory arenas shrink after each run, such as `cpu:0`; empty for none.
        cuda_graphs: Whether runs are captured as CUDA graphs and replayed; needs the provider's `enable_cuda_graph`.
        fused_products: For a provider that runs the graph as one kernel: the graph's products by element type.
        owned: Closed with the session, or when there will be none.

    Raises:
        LoweringError: ONNX Runtime refuses the graph or chooses another provider, or Triton cannot carry its tensors.
    """

    def __init__(
        self,
        graph_path: Path,
        options: onnxruntime.SessionOptions,
        providers: Sequence[Provider],
        *,
        arena_shrinkage: str = "",
        cuda_graphs: bool = False,
        fused_products: Mapping[KernelType, int] | None = None,
        owned: Closeable | None = None,
    ) -> None:
        self._graph_path = graph_path
        self._options = options
        self._providers = list(providers)
        self._fused_products = fused_products or {}
        self._owned = owned
        try:
            self._session = _open(graph_path, options, self._providers)
            self._signature = signature_of(self._session, graph_path)
        except BaseException:
            self._close_owned()
            raise
        specs = (*self._signature.inputs, *self._signature.outputs)
        self._has_bf16 = any(spec.dtype is DType.BF16 for spec in specs)
        self._has_strings = any(spec.dtype is DType.BYTES for spec in self._signature.inputs)
        self._outputs = [spec.name for spec in self._signature.outputs]
        self._run_options = _run_options(arena_shrinkage)
        self._limit = current_limit()
        self._runner: CudaGraphRunner | None = None
        if cuda_graphs:  # plain runs stand beside the captured ones, for the profile
            self._run_options.add_run_config_entry("gpu_graph_id", NO_CAPTURE)
            if not (self._has_bf16 or self._has_strings):
                self._runner = CudaGraphRunner(self._session, device_id=int(self._providers[0][1]["device_id"]))

    @property
    def signature(self) -> Signature:
        """Inputs and outputs as ONNX Runtime sees them."""
        return self._signature

    def run(self, feeds: Mapping[str, AnyArray], outputs: Sequence[str] | None = None) -> dict[str, AnyArray]:
        """Computes outputs; see `engines.base.Session.run`."""
        return self._run(self._session, feeds, outputs, self._runner)

    @property
    def why_not_on_device(self) -> str:
        """See `engines.base.DeviceSession`."""
        return why_not_on_device(self._signature)

    def run_on_device(
        self, feeds: Mapping[str, AnyArray | DeviceTensor], outputs: Sequence[str]
    ) -> dict[str, DeviceTensor]:
        """See `engines.base.DeviceSession`."""
        with self._limit.computation(self._interrupt) if self._limit else nullcontext():
            try:
                return run_bound(self._session, self._providers[0], feeds, outputs, self._run_options)
            except _ERRORS as error:
                raise self._explained(error) from error

    def placement(self, feeds: Mapping[str, AnyArray]) -> Placement:
        """Runs the feeds under ONNX Runtime's profiler and counts the kernels that ran.

        In a session of its own, which lives as long as that: one that was ever profiled loses 40 bytes at each later
        run (seen with ONNX Runtime 1.31).
        """
        try:
            events = self._profile(feeds, None)
        except (OSError, ValueError):  # a full disk cuts the profile off, and nothing says so
            events = self._profile_in_memory(feeds)
        return summarize_profile(events, self._providers[0][0], self._fused_products)

    def _profile_in_memory(self, feeds: Mapping[str, AnyArray]) -> Any:
        try:
            return self._profile(feeds, _SHARED_MEMORY)
        except (OSError, ValueError) as error:
            raise LoweringError(
                f"cannot write a profile of {self._graph_path}, which shows what really runs",
                attempts=(str(error),),
                hint="make room in the temporary folder (TMPDIR)",
            ) from error

    def _profile(self, feeds: Mapping[str, AnyArray], place: Path | None) -> Any:
        with tempfile.TemporaryDirectory(prefix="graphkiln-profile-", dir=place) as folder:
            self._options.enable_profiling = True
            self._options.profile_file_prefix = str(Path(folder) / "profile")
            session = _open(self._graph_path, self._options, self._providers)
            try:
                self._run(session, feeds)
            finally:
                profile = Path(session.end_profiling())
            return json.loads(profile.read_bytes())

    def close(self) -> None:
        """Drops the runtime's session."""
        del self._session, self._runner
        self._close_owned()

    def _run(
        self,
        session: onnxruntime.InferenceSession,
        feeds: Mapping[str, AnyArray],
        outputs: Sequence[str] | None = None,
        runner: CudaGraphRunner | None = None,
    ) -> dict[str, AnyArray]:
        names = self._outputs if outputs is None else outputs
        if self._has_strings:
            feeds = {name: decode_text(name, array) for name, array in feeds.items()}
        if self._limit:
            with self._limit.computation(self._interrupt):
                return self._compute(session, feeds, names, runner)
        return self._compute(session, feeds, names, runner)

    def _compute(
        self,
        session: onnxruntime.InferenceSession,
        feeds: Mapping[str, AnyArray],
        names: Sequence[str],
        runner: CudaGraphRunner | None,
    ) -> dict[str, AnyArray]:
        try:
            if runner:
                return runner.run(feeds, names)
            if self._has_bf16:
                arrays = run_ort_values(session, names, feeds, self._run_options)
            else:
                arrays = session.run(names, feeds, self._run_options)
        except _ERRORS as error:
            raise self._explained(error) from error
        return dict(zip(names, arrays, strict=True))

    def _explained(self, error: Exception) -> GraphkilnError:
        """An error of the runtime as one of ours."""
        if isinstance(error, native.InvalidArgument):
            expected = ", ".join(map(str, self._signature.inputs))
            return SignatureError("ONNX Runtime refuses the input", expected=expected, got=str(error))
        return ExecutionError(f"ONNX Runtime failed: {error}")

    def _interrupt(self) -> None:
        self._run_options.terminate = True  # looked at before each operator, also in a loop

    def _close_owned(self) -> None:
        if self._owned:
            self._owned.close()


def session_options(config: SessionConfig) -> onnxruntime.SessionOptions:
    """ONNX Runtime's session options for a configuration; as `register`, where it names custom operators."""
    tuning = config.tuning
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = _LEVELS[tuning.graph_level]
    options.execution_mode = (
        onnxruntime.ExecutionMode.ORT_PARALLEL if tuning.parallel else onnxruntime.ExecutionMode.ORT_SEQUENTIAL
    )
    options.intra_op_num_threads = config.threads
    options.inter_op_num_threads = tuning.inter_threads or (config.threads if tuning.parallel else 1)
    options.enable_cpu_mem_arena = tuning.memory_arena
    options.enable_mem_pattern = tuning.memory_pattern
    spinning = {"session.intra_op.allow_spinning": "1" if config.spin else "0"}
    for name, value in {**spinning, **_EXACT_PRODUCTS, **tuning.config_entries}.items():
        options.add_session_config_entry(name, value)
    register(options, config.op_libraries)
    return options


def disable_optimizations(options: onnxruntime.SessionOptions) -> None:
    """Makes a session run the graph as it stands in the file."""
    options.graph_optimization_level = _LEVELS["off"]


def save_optimized(graph_path: Path, options: onnxruntime.SessionOptions, target: Path) -> None:
    """Writes the graph as these options optimize it for the CPU, its weights to `WEIGHTS` beside it.

    Raises:
        LoweringError: ONNX Runtime refuses the graph.
    """
    options.optimized_model_filepath = str(target)
    options.add_session_config_entry("session.optimized_model_external_initializers_file_name", WEIGHTS)
    options.add_session_config_entry("session.optimized_model_external_initializers_min_size_in_bytes", "1024")
    session = _open(graph_path, options, [(CPU, {})])
    # Of a graph of IR version 3, what ONNX Runtime folds becomes an input that every request would have to hold.
    keep_inputs(target, {node.name for node in (*session.get_inputs(), *session.get_overridable_initializers())})
    align_prepacked(target, target.with_name(WEIGHTS))


def _open(
    graph_path: Path, options: onnxruntime.SessionOptions, providers: list[Provider]
) -> onnxruntime.InferenceSession:
    """Loads a graph, and makes sure that the first provider took it.

    Raises:
        LoweringError: ONNX Runtime refuses the graph or chooses another provider.
    """
    # What goes wrong on the CPU is raised; a GPU's provider that does not start is said in the log alone.
    options.log_severity_level = 4 if providers[0][0] == CPU else 3
    try:
        session = _load(graph_path, options, providers)
    except _ERRORS as error:
        hint = hint_for(str(error), graph_path)
        raise LoweringError(f"ONNX Runtime cannot load {graph_path}", attempts=(str(error),), hint=hint) from error
    requested, chosen = providers[0][0], session.get_providers()
    if chosen[0] != requested:
        raise LoweringError(
            f"{graph_path} would not run on the requested provider",
            attempts=(f"requested {requested}, ONNX Runtime chose {', '.join(chosen)}",),
        )
    return session


def _load(
    graph_path: Path, options: onnxruntime.SessionOptions, providers: list[Provider]
) -> onnxruntime.InferenceSession:
    load = partial(onnxruntime.InferenceSession, sess_options=options, providers=providers, enable_fallback=0)
    try:
        return load(str(graph_path))
    except native.Fail as error:
        if _SHARED_BYTES not in str(error):
            raise
    from graphkiln_backend.engines.onnxruntime.unsharing import unshare_bytes  # brings onnx, which few starts need

    options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(graph_path.parent))
    return load(unshare_bytes(graph_path))


def _run_options(arena_shrinkage: str) -> onnxruntime.RunOptions:
    options = onnxruntime.RunOptions()
    options.log_severity_level = 4  # what a request does wrong is said in its response
    if arena_shrinkage:
        options.add_run_config_entry("memory.enable_memory_arena_shrinkage", arena_shrinkage)
    return options
