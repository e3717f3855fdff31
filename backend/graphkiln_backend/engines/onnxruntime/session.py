"""Sessions of ONNX Runtime.

Providers are named explicitly and read back after the build, because ONNX Runtime silently falls back to the CPU if a
provider cannot start. Falling back after a failed request is disabled.
"""

from __future__ import annotations

import ctypes
import json
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import onnxruntime
from onnxruntime.capi import onnxruntime_pybind11_state as native

from graphkiln_backend.engines.base import PLAIN_RUNS, DeviceTensor, KernelType, Placement
from graphkiln_backend.engines.compute_limit import current_limit
from graphkiln_backend.engines.onnxruntime.loading import CUDA, ERRORS, Provider, open_session
from graphkiln_backend.graph.arrays import as_text
from graphkiln_backend.graph.dtypes import AnyArray, DType
from graphkiln_backend.graph.errors import ExecutionError, GraphkilnError, LoweringError, ManifestError, SignatureError
from graphkiln_backend.graph.modules import LazyModule
from graphkiln_backend.graph.precision import Precision
from graphkiln_backend.graph.signature import ANY_RANK, Signature, TensorSpec, free_dim
from graphkiln_backend.repository.onnx_file import read_graph
from graphkiln_backend.system.closing import Closeable

if TYPE_CHECKING:
    import onnx
else:
    onnx = LazyModule("onnx")  # only for text


_SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - has space when the disk is full
_ONNX_BF16 = 16  # source: `onnx.TensorProto.BFLOAT16`
_CARRIED = "__dlpack__"  # method of a tensor that other libraries can use where it is
# Operators that are products, by ONNX Runtime's names after its rewriting.
PRODUCTS = (
    {"Conv", "FusedConv", "NhwcConv", "NhwcFusedConv", "ConvTranspose", "ConvInteger", "QLinearConv", "QConv"}
    | {"MatMul", "FusedMatMul", "Gemm", "FusedGemm", "GemmFastGelu", "MatMulInteger", "MatMulIntegerToFloat"}
    | {"QLinearMatMul", "QGemm", "DynamicQuantizeMatMul", "Einsum"}
)
_KERNEL_TIME = "_kernel_time"  # suffix of the event name of an executed kernel
# ONNX Runtime's names of element types, the narrowest first.
_KERNEL_TYPES: tuple[tuple[str, KernelType], ...] = (
    ("int8", Precision.INT8),
    ("uint8", Precision.INT8),
    ("bfloat16", Precision.BF16),
    ("float16", Precision.FP16),
    ("float", Precision.FP32),
    ("double", "fp64"),
)
_MAX_CAPTURES = 64  # each holds its buffers on the device. Further shapes run without a capture.
NO_CAPTURE = "-1"  # value of `gpu_graph_id` for a run that neither captures nor replays


class OnnxRuntimeSession(Closeable):
    """A loaded graph; see `engines.base.Session`.

    Args:
        graph_path: The graph.
        options: ONNX Runtime's session options.
        providers: Names and options; the first one must accept the graph, the others run the remaining nodes.
        arena_shrinkage: Devices whose memory arenas shrink after each run, such as `cpu:0`; empty for none.
        cuda_graphs: Whether to capture and replay runs as CUDA graphs; needs the provider's `enable_cuda_graph`.
        fused_products: Products of the graph by type, for a provider that runs the graph as one kernel.
        owned: Closed with the session, or if the session cannot be built.

    Attributes:
        notes: See `engines.base.NotedSession`.
        fused_products: As the argument.

    Raises:
        LoweringError: ONNX Runtime refuses the graph or chooses another provider, or Triton does not support a tensor.
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
        self.notes: tuple[str, ...] = ()
        self._graph_path = graph_path
        self._options = options
        self._providers = list(providers)
        self.fused_products = fused_products or {}
        self._owned = owned
        try:
            self._session = open_session(graph_path, options, self._providers)
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
        if cuda_graphs:  # uncaptured runs are needed for the profile
            self._run_options.add_run_config_entry("gpu_graph_id", NO_CAPTURE)
            if not (self._has_bf16 or self._has_strings):
                self._runner = CudaGraphRunner(self._session, device_id=int(self._providers[0][1]["device_id"]))

    @property
    def signature(self) -> Signature:
        """Inputs and outputs as reported by ONNX Runtime."""
        return self._signature

    def run(self, feeds: Mapping[str, AnyArray], outputs: Sequence[str] | None = None) -> dict[str, AnyArray]:
        """Compute outputs; see `engines.base.Session.run`."""
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
            except ERRORS as error:
                raise self._explained(error) from error

    def placement(self, feeds: Mapping[str, AnyArray]) -> Placement:
        """Run the feeds under ONNX Runtime's profiler, in another session, and count the kernels that ran.

        A session that was ever profiled loses 40 bytes at each later run (seen with ONNX Runtime 1.31).
        """
        return summarize_profile(self._read_profile(feeds), self._providers[0][0], self.fused_products)

    def time_nodes(self, feeds: Mapping[str, AnyArray], runs: int) -> dict[str, float]:
        """See `engines.base.TimedSession`; runs in another session, like `placement`."""
        return seconds_of_nodes(self._read_profile(feeds, runs))

    def _read_profile(self, feeds: Mapping[str, AnyArray], runs: int = 1) -> Any:
        try:
            return self._profile(feeds, None, runs)
        except (OSError, ValueError):  # a full disk truncates the profile without an error
            return self._profile_in_memory(feeds, runs)

    def _profile_in_memory(self, feeds: Mapping[str, AnyArray], runs: int) -> Any:
        try:
            return self._profile(feeds, _SHARED_MEMORY, runs)
        except (OSError, ValueError) as error:
            raise LoweringError(
                f"cannot write a profile of {self._graph_path}, which shows what really runs",
                attempts=(str(error),),
                hint="make room in the temporary folder (TMPDIR)",
            ) from error

    def _profile(self, feeds: Mapping[str, AnyArray], place: Path | None, runs: int) -> Any:
        with tempfile.TemporaryDirectory(prefix="graphkiln-profile-", dir=place) as folder:
            self._options.enable_profiling = True
            self._options.profile_file_prefix = str(Path(folder) / "profile")
            session = open_session(self._graph_path, self._options, self._providers)
            try:
                for _ in range(runs):
                    self._run(session, feeds)
            finally:
                profile = Path(session.end_profiling())
            return json.loads(profile.read_bytes())

    def close(self) -> None:
        """Drop the runtime's session."""
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
        except ERRORS as error:
            raise self._explained(error) from error
        return dict(zip(names, arrays, strict=True))

    def _explained(self, error: Exception) -> GraphkilnError:
        """Convert an error of the runtime."""
        if isinstance(error, native.InvalidArgument):
            expected = ", ".join(map(str, self._signature.inputs))
            return SignatureError("ONNX Runtime refuses the input", expected=expected, got=str(error))
        return ExecutionError(f"ONNX Runtime failed: {error}")

    def _interrupt(self) -> None:
        self._run_options.terminate = True  # checked before each operator, also in a loop

    def _close_owned(self) -> None:
        if self._owned:
            self._owned.close()


def _run_options(arena_shrinkage: str) -> onnxruntime.RunOptions:
    options = onnxruntime.RunOptions()
    options.log_severity_level = 4  # errors of a request are in its response
    if arena_shrinkage:
        options.add_run_config_entry("memory.enable_memory_arena_shrinkage", arena_shrinkage)
    return options


def signature_of(session: onnxruntime.InferenceSession, graph_path: Path) -> Signature:
    """Read a session's signature, without outputs that are not tensors.

    Raises:
        LoweringError: Triton does not support the type of a tensor, or no output is a tensor.
    """
    outputs = session.get_outputs()
    tensors = list({node.name: node for node in outputs if node.type.startswith("tensor(")}.values())
    if outputs and not tensors:
        listed = ", ".join(f"{node.name}: {node.type}" for node in outputs)
        raise LoweringError(
            f"ONNX Runtime cannot serve {graph_path}",
            attempts=(f"no output is a tensor that Triton carries: {listed}",),
        )
    try:
        return Signature(
            inputs=ranked(tuple(_spec(node) for node in session.get_inputs()), graph_path),
            outputs=tuple(map(_spec, tensors)),
            optional_inputs=tuple(_spec(node) for node in session.get_overridable_initializers()),
        )
    except ManifestError as error:
        raise LoweringError(f"ONNX Runtime cannot serve {graph_path}", attempts=(str(error),)) from error


def _spec(node: Any) -> TensorSpec:
    return TensorSpec(
        name=node.name,
        dtype=DType.from_onnxruntime(node.type),
        # ONNX Runtime gives None for a dimension without a name, or the -1 that an older exporter wrote.
        shape=tuple(free_dim(node.name, axis) if dim in (None, -1) else dim for axis, dim in enumerate(node.shape)),
    )


# Tensors that ONNX Runtime's numpy binding does not handle: text as bytes, bf16, and unknown rank.


def decode_text(name: str, array: AnyArray) -> AnyArray:
    """Decode an array of bytes objects, since the binding would convert b'a' to the text "b'a'".

    Other arrays are returned unchanged. `name` is the input, for the error.

    Raises:
        SignatureError: An element is not UTF-8.
    """
    try:
        return as_text(array)
    except UnicodeDecodeError as error:
        raise SignatureError(
            f"input '{name}' holds text that cannot be read", expected="UTF-8", got=str(error)
        ) from error


def run_ort_values(
    session: onnxruntime.InferenceSession,
    outputs: Sequence[str],
    feeds: Mapping[str, AnyArray],
    options: onnxruntime.RunOptions,
) -> list[AnyArray]:
    """Run a graph with bf16 inputs or outputs, which the numpy binding does not know.

    Returns:
        New arrays in the order of `outputs`; bf16 as `ml_dtypes.bfloat16`.
    """
    values = {name: _to_ort_value(array) for name, array in feeds.items()}
    arrays = map(_to_array, session.run_with_ort_values(outputs, values, options))
    # An output that is an input is a view of the caller's memory here, other than with `session.run` (1.32).
    return [np.array(array) if name in feeds else array for name, array in zip(outputs, arrays, strict=True)]


def _to_ort_value(array: AnyArray) -> onnxruntime.OrtValue:
    if array.dtype == object:
        return _text_value(array)
    if array.dtype != DType.BF16.numpy:
        return onnxruntime.OrtValue.ortvalue_from_numpy(array)
    return onnxruntime.OrtValue.ortvalue_from_numpy_with_onnx_type(np.ascontiguousarray(array), _ONNX_BF16)


def _text_value(array: AnyArray) -> onnxruntime.OrtValue:
    """Create a text value by running a graph with a constant: the binding cannot create one from an array."""
    text = onnx.TensorProto(
        data_type=onnx.TensorProto.STRING, dims=array.shape, string_data=[str(item).encode() for item in array.flat]
    )
    output = onnx.helper.make_tensor_value_info("y", onnx.TensorProto.STRING, array.shape)
    graph = onnx.helper.make_graph([onnx.helper.make_node("Constant", [], ["y"], value=text)], "text", [], [output])
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 18)], ir_version=8)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    (value,) = session.run_with_ort_values(["y"], {}, None)
    return value


def _to_array(value: onnxruntime.OrtValue) -> AnyArray:
    array: AnyArray
    if value.element_type() != _ONNX_BF16:
        array = value.numpy()
        return array
    array = np.empty(value.shape(), DType.BF16.numpy)
    ctypes.memmove(array.ctypes.data, value.data_ptr(), array.nbytes)
    return array


def ranked(inputs: tuple[TensorSpec, ...], graph_path: Path) -> tuple[TensorSpec, ...]:
    """Mark inputs of unknown rank, which ONNX Runtime reports as scalars."""
    if all(spec.shape for spec in inputs):
        return inputs
    stated = {value.name: value.type.tensor_type.HasField("shape") for value in read_graph(graph_path).graph.input}
    return tuple(spec if stated.get(spec.name, True) else replace(spec, shape=(ANY_RANK,)) for spec in inputs)


# Runs whose tensors stay on the device for the next session.
#
# Not yet run on a GPU: built from the documentation and tested on the CPU, where bindings are the same.
#
# Source: ONNX Runtime, "I/O Binding"; DLPack, "Python Specification for DLPack".


def why_not_on_device(signature: Signature) -> str:
    """Return the reason why a session with this signature cannot leave its tensors on the device, or empty."""
    if not hasattr(onnxruntime.OrtValue, _CARRIED):
        return f"ONNX Runtime {onnxruntime.__version__} hands no tensors to other libraries (DLPack); 1.32 does"
    bound = [spec for spec in (*signature.inputs, *signature.outputs) if spec.dtype in (DType.BYTES, DType.BF16)]
    return f"'{bound[0].name}' is {bound[0].dtype}, which cannot be bound" if bound else ""


def run_bound(
    session: onnxruntime.InferenceSession,
    provider: Provider,
    feeds: Mapping[str, AnyArray | DeviceTensor],
    outputs: Sequence[str],
    options: onnxruntime.RunOptions,
) -> dict[str, DeviceTensor]:
    """Compute outputs that stay on the provider's device; they are complete when this returns.

    Args:
        session: The session.
        provider: Provider of the session.
        feeds: Arrays, which are copied to the device, and tensors on the device.
        outputs: Names of the outputs.
        options: Run options.
    """
    kind, facts = provider
    device = ("cuda", int(facts["device_id"])) if kind == CUDA else ("cpu", 0)
    binding = session.io_binding()
    for name, tensor in feeds.items():
        if isinstance(tensor, np.ndarray):
            binding.bind_cpu_input(name, np.ascontiguousarray(tensor))
        else:
            own = isinstance(tensor, onnxruntime.OrtValue)
            binding.bind_ortvalue_input(name, tensor if own else onnxruntime.OrtValue.from_dlpack(tensor))
    for name in outputs:
        binding.bind_output(name, *device)
    session.run_with_iobinding(binding, options)
    return dict(zip(outputs, binding.get_outputs(), strict=True))


# Profiles of ONNX Runtime: kernels, their provider and element types.


def summarize_profile(
    events: Sequence[dict[str, Any]], provider: str, fused_products: Mapping[KernelType, int]
) -> Placement:
    """Count the kernels of a profile.

    Args:
        events: The profile.
        provider: Requested execution provider.
        fused_products: Products of the graph by type, if the provider reports whole graphs as single kernels; products
            that did not run elsewhere ran inside them.
    """
    kernels = [event for event in events if _is_kernel(event)]
    products = [kernel for kernel in kernels if kernel["args"].get("op_name") in PRODUCTS]
    duration_by_type: Counter[KernelType] = Counter()
    for kernel in products or kernels:  # indices and shapes may take longer than the products of a small graph
        duration_by_type[_kernel_type(kernel)] += kernel["dur"] + 1
    elsewhere = [kernel for kernel in products if _provider(kernel) != provider]
    counts: Counter[KernelType] = Counter(map(_kernel_type, products))
    if fused_products and any(_provider(kernel) == provider for kernel in kernels):
        counts = Counter(fused_products) - Counter(map(_kernel_type, elsewhere))
    return Placement(
        nodes=dict(Counter(map(_provider, kernels))),
        precision=duration_by_type.most_common(1)[0][0] if duration_by_type else "unknown",
        products=dict(counts),
        elsewhere=tuple(kernel["name"].removesuffix(_KERNEL_TIME) for kernel in elsewhere),
    )


def seconds_of_nodes(events: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Return the median seconds of each node by name, from a profile of one run or several."""
    from statistics import median  # 5 ms of imports, not needed by servers

    durations: dict[str, list[float]] = {}
    for event in filter(_is_kernel, events):
        durations.setdefault(event["name"].removesuffix(_KERNEL_TIME), []).append(event["dur"] / 1e6)
    return {name: median(taken) for name, taken in durations.items()}


def _is_kernel(event: dict[str, Any]) -> bool:
    return event.get("cat") == "Node" and "args" in event and event["name"].endswith(_KERNEL_TIME)


def _provider(kernel: dict[str, Any]) -> str:
    return str(kernel["args"].get("provider", "unknown"))


def _kernel_type(kernel: dict[str, Any]) -> KernelType:
    """Return the narrowest arithmetic type of a kernel's inputs, since integer kernels also read float scales."""
    types = {name for tensor in kernel["args"].get("input_type_shape", []) for name in tensor}
    return next((kernel_type for name, kernel_type in _KERNEL_TYPES if name in types), "integer")


# CUDA graphs: one capture for each set of input shapes.
#
# A captured graph replays its kernels at the addresses of the first run, so inputs and outputs are in fixed buffers.
# ONNX Runtime ties a capture to its thread, so other threads run without one (`engines.base.PLAIN_RUNS`).
#
# Not yet run on a GPU: built from the documentation and tested without one; `scripts/gpu-check` is the first run.
#
# Source: ONNX Runtime, "CUDA Execution Provider" (`enable_cuda_graph`, run option `gpu_graph_id`).


@dataclass(frozen=True, kw_only=True, slots=True)
class _Capture:
    binding: onnxruntime.IOBinding
    inputs: Mapping[str, onnxruntime.OrtValue]
    outputs: Mapping[str, onnxruntime.OrtValue]
    options: onnxruntime.RunOptions


class CudaGraphRunner:
    """A session on fixed buffers. Not thread-safe, as a session is not.

    Args:
        session: Made with `enable_cuda_graph`.
        device: Device of the buffers: `cuda`, or `cpu` for tests.
        device_id: Number of the GPU.
    """

    def __init__(self, session: onnxruntime.InferenceSession, device: str = "cuda", device_id: int = 0) -> None:
        self._session = session
        self._device = device
        self._device_id = device_id
        self._captures: dict[tuple[object, ...], _Capture] = {}

    def run(self, feeds: Mapping[str, AnyArray], outputs: Sequence[str]) -> dict[str, AnyArray]:
        """Compute outputs; see `engines.base.Session.run`."""
        if PLAIN_RUNS.get():
            return self._run_plain(feeds, outputs)
        key = (*outputs, *((name, array.shape) for name, array in sorted(feeds.items())))
        capture = self._captures.get(key)
        if capture is None:
            results = self._run_plain(feeds, outputs)
            if len(self._captures) < _MAX_CAPTURES:
                self._captures[key] = self._bind(feeds, results)
            return results
        for name, array in feeds.items():
            capture.inputs[name].update_inplace(np.ascontiguousarray(array))
        self._session.run_with_iobinding(capture.binding, capture.options)
        return {name: np.array(value.numpy()) for name, value in capture.outputs.items()}

    def _run_plain(self, feeds: Mapping[str, AnyArray], outputs: Sequence[str]) -> dict[str, AnyArray]:
        arrays = self._session.run(list(outputs), dict(feeds), _options(NO_CAPTURE))
        return dict(zip(outputs, arrays, strict=True))

    def _bind(self, feeds: Mapping[str, AnyArray], results: Mapping[str, AnyArray]) -> _Capture:
        """Allocate buffers for these shapes; CUDA captures the first run on them."""
        device = (self._device, self._device_id)
        inputs = {
            # A copy: on the CPU the value would alias the caller's array, which later runs overwrite.
            name: onnxruntime.OrtValue.ortvalue_from_numpy(np.array(array, order="C"), *device)
            for name, array in feeds.items()
        }
        outputs = {
            # ONNX Runtime (1.32) does not write an output that is an input into the buffer bound for it.
            name: inputs[name]
            if name in inputs
            else onnxruntime.OrtValue.ortvalue_from_shape_and_type(array.shape, array.dtype.type, *device)
            for name, array in results.items()
        }
        binding = self._session.io_binding()
        for name, value in inputs.items():
            binding.bind_ortvalue_input(name, value)
        for name, value in outputs.items():
            binding.bind_ortvalue_output(name, value)
        options = _options(str(len(self._captures) + 1))
        return _Capture(binding=binding, inputs=inputs, outputs=outputs, options=options)


def _options(graph_id: str) -> onnxruntime.RunOptions:
    options = onnxruntime.RunOptions()
    options.add_run_config_entry("gpu_graph_id", graph_id)
    return options
