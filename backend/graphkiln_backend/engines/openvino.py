"""OpenVINO: the second engine for the CPU, often the fastest one.

OpenVINO (2026.4) deviates from ONNX for some operators, which are corrected in the graph that it has read, or refused:
`openvino_numbers`. On processors with AVX512-BF16 it computes in bf16 by default, so the precision is always set, and
read back from the compiled model.

A graph in OpenVINO IR means what OpenVINO makes of it, so nothing is corrected there. What depends on the machine or on
the values of a request is refused for it, too: integers that need more than 32 bits, FP64, and products of bytes that
overflow.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import openvino

from graphkiln_backend.engines.base import KernelType, Placement, SessionConfig, Support
from graphkiln_backend.engines.compute_limit import current_limit
from graphkiln_backend.engines.openvino_numbers import NO_CHECKS, Checks, apply_table, table_digest
from graphkiln_backend.graph.device import Device
from graphkiln_backend.graph.dtypes import AnyArray, DType
from graphkiln_backend.graph.errors import ExecutionError, LoweringError, ManifestError
from graphkiln_backend.graph.precision import Precision
from graphkiln_backend.graph.signature import ANY_RANK, Signature, TensorSpec, free_dim
from graphkiln_backend.repository.openvino_ir import FORMAT, is_ir, read_ir
from graphkiln_backend.repository.version import read_graph_signature
from graphkiln_backend.system.closing import Closeable

DEVICE = "CPU"
# Created during the import, which a single thread runs. The first array that OpenVINO (2026.4) returns initializes a
# table with the GIL released: a second thread that waits for the table while holding the GIL would deadlock.
_FIRST_ARRAY = openvino.Tensor(np.zeros(1, np.float32)).data
_NOT_KERNELS = {"Parameter", "Result", "Input", "Output", "Constant", "Const", "Reorder"}
# Layers that are products, by OpenVINO's names after its rewriting.
_PRODUCTS = {"Convolution", "Deconvolution", "MatMul", "FullyConnected", "GroupConvolution", "BinaryConvolution"}
_COMPILED = "model.blob"  # file name in existing cache entries
# Values of its precision hint that lower a graph in its own format.
_HINTS: dict[Precision | None, str] = {Precision.BF16: "bf16", Precision.FP16: "f16"}
# OpenVINO's names of element types.
_KERNEL_TYPES: dict[str, KernelType] = {
    "f32": Precision.FP32,
    "f16": Precision.FP16,
    "bf16": Precision.BF16,
    "f64": "fp64",
    "i8": Precision.INT8,
    "u8": Precision.INT8,
    **dict.fromkeys(("i4", "i16", "i32", "i64", "u1", "u4", "u16", "u32", "u64", "boolean"), "integer"),
}

# Kernels whose output may be the memory of their input.
_VIEWS = frozenset(
    (
        "Broadcast",
        "Concatenation",
        "Convert",
        "Identity",
        "If",
        "Reorder",
        "Reshape",
        "Split",
        "StridedSlice",
        "Transpose",
    )
)


def open_core() -> openvino.Core:
    """Create a core, and load its CPU plugin in a temporary thread.

    The plugin replaces the signal stack of the thread that loads it, and restores the previous one when it is unloaded
    (seen with 2026.4 on a processor with AVX512). If two plugins are not unloaded in reverse order, one restores a
    stack that the other has freed, and the next signal, such as Ctrl-C, kills the process. A finished thread gets no
    signals. (A single core for all sessions does not help: `infer` crashed after other sessions had ended.)
    """
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(_load_plugin).result()


def _load_plugin() -> openvino.Core:
    core = openvino.Core()
    core.get_property(DEVICE, "FULL_DEVICE_NAME")
    return core


def read_graph(core: openvino.Core, path: Path) -> openvino.Model:
    """Read a graph; correct an ONNX graph where OpenVINO deviates from ONNX.

    Raises:
        RuntimeError: OpenVINO refuses the graph.
        LoweringError: The graph keeps a state, or `openvino_numbers.TABLE` refuses an operation.
        RepositoryError: A file of a graph in OpenVINO IR is damaged.
    """
    is_onnx = not is_ir(path)
    # Reading it checks both files, since OpenVINO may crash on damaged ones.
    if not is_onnx and read_ir(path).keeps_states:
        raise LoweringError(
            "the graph keeps a state between requests, which may come from different clients",
            attempts=(),
            hint="export it with its states as inputs and outputs",
        )
    model = core.read_model(str(path))
    apply_table(model, path if is_onnx else None)
    return model


def check_types(signature: Signature) -> None:
    """Refuse graphs with FP64 tensors: infinities would come back as the largest FP32.

    Raises:
        LoweringError: A tensor is FP64.
    """
    wide = [spec.name for spec in (*signature.inputs, *signature.outputs) if spec.dtype is DType.FP64]
    if wide:
        raise LoweringError(
            "OpenVINO computes FP64 in FP32", attempts=(f"'{wide[0]}' is FP64",), hint="set engine: onnxruntime"
        )


def examine(graph_path: Path) -> Checks:
    """Check a graph in ONNX that ONNX Runtime gives to OpenVINO, without the corrections of this engine.

    OpenVINO's plugin for ONNX Runtime (1.8.1) does not always write an output that is an input, after another batch
    size: the answer is memory of an earlier request. OpenVINO then has no kernel between the two that computes.

    Returns:
        The checks that each request needs.

    Raises:
        LoweringError: OpenVINO refuses the graph or deviates from ONNX, or an output is an input.
    """
    check_types(read_graph_signature(graph_path))
    try:
        core = open_core()
        model = core.read_model(str(graph_path))
        apply_table(model, graph_path, rewrites=False)
        compiled = core.compile_model(model, DEVICE, {"INFERENCE_PRECISION_HINT": "f32"})
    except (RuntimeError, ValueError, TypeError) as error:
        raise LoweringError(f"OpenVINO cannot load {graph_path}", attempts=(str(error),)) from error
    unread = {each.get_friendly_name() for each in model.get_parameters() if not each.output(0).get_target_inputs()}
    empty = [shape for each in model.outputs if (shape := each.get_partial_shape()).rank.is_static and 0 in shape]
    if empty:
        raise LoweringError(
            "the plugin of OpenVINO returns outputs without elements in the shape of an earlier request",
            attempts=(f"an output is {empty[0]}",),
        )
    of_inputs: set[str] = set()  # names of operations whose memory may be that of an input
    for operation in compiled.get_runtime_model().get_ordered_ops():
        layer, name = str(operation.get_rt_info()["layerType"].astype(str)), operation.get_friendly_name()
        sources = {each.get_node().get_friendly_name() for each in operation.input_values()}
        if layer == "Output" and sources & of_inputs:
            raise LoweringError(
                "the plugin of OpenVINO does not always write an output that is an input",
                attempts=(f"nothing is computed between '{', '.join(sources)}' and an input",),
            )
        if (layer == "Input" and name not in unread) or (layer in _VIEWS and sources & of_inputs):
            of_inputs.add(name)
    return Checks.of(model, is_onnx=True)


# The inputs and outputs of a compiled OpenVINO graph may have other names than those of the ONNX graph.
def first_specs(ports: Sequence[Any]) -> tuple[TensorSpec, ...]:
    """Return the specs of ports, by the first of their names."""
    return tuple(spec_of(port, port.get_any_name()) for port in ports)


def match(ports: Sequence[Any], specs: Sequence[TensorSpec]) -> dict[str, int]:
    """Return input name -> port index, without the inputs that OpenVINO has dropped."""
    if len(ports) == len(specs):
        by_name = [_index(ports, spec.name, index) for index, spec in enumerate(specs)]
        return {spec.name: index for spec, index in zip(specs, by_name, strict=True)}
    named = {spec.name: _index(ports, spec.name, -1) for spec in specs}
    return {name: index for name, index in named.items() if index >= 0}


def _index(ports: Sequence[Any], name: str, otherwise: int) -> int:
    return next((index for index, port in enumerate(ports) if name in port.get_names()), otherwise)


def spec_of(port: Any, name: str) -> TensorSpec:
    """Return the spec of a port.

    Raises:
        ManifestError: Triton cannot carry its element type.
    """
    dtype = DType.from_openvino(port.get_element_type().get_type_name())
    shape = port.get_partial_shape()
    if shape.rank.is_dynamic:
        return TensorSpec(name=name, dtype=dtype, shape=(ANY_RANK,))
    dims = [int(dim.get_length()) if dim.is_static else free_dim(name, axis) for axis, dim in enumerate(shape)]
    return TensorSpec(name=name, dtype=dtype, shape=tuple(dims))


class OpenVinoEngine:
    """OpenVINO on the CPU. The graph's own types decide the precision: fp32, bf16, fp16 (where the CPU can), int8."""

    def probe(self, device: Device) -> Support:
        """Support only the CPU."""
        return Support(ok=False, reason=f"openvino serves cpu, not {device}") if device.is_gpu else Support(ok=True)

    def identity(self, config: SessionConfig) -> Mapping[str, str]:
        """See `engines.base.Engine.identity`."""
        options = str(sorted(_options(config).items()))
        return {"openvino": openvino.__version__, "options": options, "numbers": table_digest()}

    def compile(self, graph_path: Path, config: SessionConfig, folder: Path) -> None:
        """Write the compiled model in OpenVINO's export format.

        Raises:
            LoweringError: As `build`.
        """
        with _hints_for(graph_path):
            model, checks = _compile(graph_path, config)
        blob = model.export_model()
        checks.write(folder)
        (folder / _COMPILED).write_bytes(blob.getvalue() if hasattr(blob, "getvalue") else blob)

    def build(self, graph_path: Path, config: SessionConfig, compiled: Path | None = None) -> OpenVinoSession:
        """Compile a graph, or load a compiled one.

        Raises:
            LoweringError: OpenVINO refuses the graph or an option, or deviates from ONNX.
        """
        with _hints_for(graph_path):
            if compiled is None:
                model, checks = _compile(graph_path, config)
            else:
                model, checks = _import(compiled / _COMPILED, graph_path, config), Checks.read(compiled)
            try:
                # A compiled model does not need the graph.
                saved = read_graph_signature(graph_path) if graph_path.exists() else None
                session = OpenVinoSession(model, config.streams, saved, checks)
            except (ManifestError, ValueError) as error:
                raise LoweringError(f"OpenVINO cannot serve {graph_path}", attempts=(str(error),)) from error
            check_types(session.signature)
            return session


class OpenVinoSession(Closeable):
    """A compiled graph; see `engines.base.Session`.

    Args:
        compiled: The compiled model.
        streams: Parts of a batch that are computed in parallel, if all tensors are batchable.
        saved: Signature of the saved graph, or None for OpenVINO's first names. OpenVINO merges the names of tensors if
            it drops a node between them, and drops inputs that no output depends on.
        checks: Checks of the values of inputs.

    Raises:
        ManifestError: Triton does not support the type of a tensor.
    """

    def __init__(
        self,
        compiled: openvino.CompiledModel,
        streams: int = 1,
        saved: Signature | None = None,
        checks: Checks = NO_CHECKS,
    ) -> None:
        self._compiled = compiled
        self._checks = checks
        saved = saved or Signature(inputs=first_specs(compiled.inputs), outputs=first_specs(compiled.outputs))
        self._inputs = match(compiled.inputs, saved.inputs)
        self._outputs = {spec.name: index for index, spec in enumerate(saved.outputs)}
        self._signature = Signature(
            inputs=tuple(
                spec_of(compiled.inputs[self._inputs[spec.name]], spec.name) if spec.name in self._inputs else spec
                for spec in saved.inputs
            ),
            outputs=tuple(spec_of(port, spec.name) for port, spec in zip(compiled.outputs, saved.outputs, strict=True)),
        )
        splits = saved.batchable and self._signature.batchable
        self._requests = [compiled.create_infer_request() for _ in range(streams if splits else 1)]
        self._limit = current_limit()
        self._bf16_outputs = {spec.name for spec in self._signature.outputs if spec.dtype is DType.BF16}

    @property
    def signature(self) -> Signature:
        """Inputs and outputs as reported by OpenVINO, which does not keep names of dynamic dimensions."""
        return self._signature

    def run(self, feeds: Mapping[str, AnyArray], outputs: Sequence[str] | None = None) -> dict[str, AnyArray]:
        """Compute outputs; see `engines.base.Session.run`. OpenVINO always computes all of them."""
        names = list(self._outputs) if outputs is None else outputs
        if self._limit:
            with self._limit.computation(self._interrupt):
                return self._compute(feeds, names)
        return self._compute(feeds, names)

    def _compute(self, feeds: Mapping[str, AnyArray], names: Sequence[str]) -> dict[str, AnyArray]:
        try:
            if len(self._requests) > 1 and len(next(iter(feeds.values()))) > 1:
                return self._run_in_parallel(feeds, names)
            request = self._requests[0]
            self._fill(request, feeds)
            results = request.infer(share_outputs=False)
        except (RuntimeError, ValueError, TypeError) as error:
            self._signature.check(feeds)  # its errors are clearer than OpenVINO's
            raise ExecutionError(f"OpenVINO failed: {error}") from error
        return {name: self._typed(name, results[self._outputs[name]]) for name in names}

    def _fill(self, request: openvino.InferRequest, feeds: Mapping[str, AnyArray]) -> None:
        """Copy feeds into the request's own tensors, except for inputs that OpenVINO has dropped.

        Memory is never shared with the caller: an output that is an input (behind a Cast that OpenVINO drops) would be
        memory of an earlier request, or writable memory of the caller (2026.4). Sharing saved 7% of a request of 1 and
        5% of one of 8 images with MobileNetV3-small, and nothing with ResNet-50 (November 2026, OpenVINO 2026.4.1, two
        cores, in turns). OpenVINO's own copy converts dtypes and accepts any shape, so both are checked here.

        Raises:
            SignatureError: An input is unknown, missing, does not fit, or has values that OpenVINO would change.
        """
        self._signature.check(feeds)
        for name, array in feeds.items():
            if name not in self._inputs:
                continue
            index = self._inputs[name]
            tensor = request.get_input_tensor(index)
            if tuple(tensor.shape) != array.shape:
                tensor.shape = array.shape
            # OpenVINO exposes bf16 to numpy as another 2-byte dtype.
            memory = tensor.data.view(array.dtype) if array.dtype == DType.BF16.numpy else tensor.data
            memory[...] = array
            self._checks.check(name, memory)  # of the copy, which is in the processor's cache: half the time

    def _interrupt(self) -> None:
        for request in self._requests:
            request.cancel()  # between two operators, not inside a loop

    def _run_in_parallel(self, feeds: Mapping[str, AnyArray], names: Sequence[str]) -> dict[str, AnyArray]:
        """Split a batch into a part for each stream, and join their outputs."""
        rows = len(next(iter(feeds.values())))
        requests = self._requests[:rows]
        cuts = [rows * index // len(requests) for index in range(len(requests) + 1)]
        for request, (start, stop) in zip(requests, pairwise(cuts), strict=True):
            self._fill(request, {name: array[start:stop] for name, array in feeds.items()})
        started = []
        try:
            for request in requests:
                request.start_async()
                started.append(request)
            for request in requests:
                request.wait()
        except BaseException:
            for request in started:  # none may keep reading inputs that the caller frees
                with suppress(RuntimeError):
                    request.wait()
            raise
        return {
            name: np.concatenate(
                [self._typed(name, request.get_output_tensor(self._outputs[name]).data) for request in requests]
            )
            for name in names
        }

    def _typed(self, name: str, array: AnyArray) -> AnyArray:
        """View an output as bf16, which OpenVINO returns as another 2-byte dtype."""
        return array.view(DType.BF16.numpy) if name in self._bf16_outputs else array

    def placement(self, feeds: Mapping[str, AnyArray]) -> Placement:
        """Run the feeds, and count the kernels of the executed model by precision."""
        self.run(feeds)
        kernels: Counter[KernelType] = Counter()
        products: Counter[KernelType] = Counter()
        for operation in self._compiled.get_runtime_model().get_ordered_ops():
            info = operation.get_rt_info()
            layer = str(info["layerType"].astype(str))
            if layer in _NOT_KERNELS:
                continue
            kernel_type = _kernel_type(layer, info)
            kernels[kernel_type] += 1
            if layer in _PRODUCTS:
                products[kernel_type] += 1
        most = (products or kernels).most_common(1)
        return Placement(
            nodes={DEVICE: kernels.total()},
            precision=most[0][0] if most else "unknown",
            products=dict(products),
        )

    def close(self) -> None:
        """Drop the compiled model."""
        del self._requests, self._compiled


def _kernel_type(layer: str, info: Any) -> KernelType:
    """Return the type that a kernel computes in.

    The runtime precision of a product in FP32 is that of its weights if these are stored in 16 bits or fewer. Its name
    ends with the type of the arithmetic: `brgconv_avx512_f32`, `undef_I8`.
    """
    if layer in _PRODUCTS and str(info["primitiveType"].astype(str)).endswith("_f32"):
        return Precision.FP32
    return _KERNEL_TYPES.get(str(info["runtimePrecision"].astype(str)).lower(), "unknown")


def _compile(graph_path: Path, config: SessionConfig) -> tuple[openvino.CompiledModel, Checks]:
    """Return the compiled graph and the checks of its inputs."""
    try:
        core = open_core()
        model = read_graph(core, graph_path)
        checks = Checks.of(model, is_onnx=not is_ir(graph_path))
        return core.compile_model(model, DEVICE, _properties(graph_path, config)), checks
    except (RuntimeError, ValueError, TypeError) as error:
        raise LoweringError(
            f"OpenVINO cannot load {graph_path}", attempts=(str(error),), hint="set engine: onnxruntime"
        ) from error


def _import(blob: Path, graph_path: Path, config: SessionConfig) -> openvino.CompiledModel:
    try:
        return open_core().import_model(blob.read_bytes(), DEVICE, _properties(graph_path, config))
    except (RuntimeError, ValueError, TypeError, OSError) as error:
        raise LoweringError(f"OpenVINO cannot load {blob}, which it compiled itself", attempts=(str(error),)) from error


@contextmanager
def _hints_for(graph_path: Path) -> Iterator[None]:
    """Correct the hint of errors that another engine would not have: only OpenVINO reads its own format.

    Raises:
        LoweringError: As in the block.
    """
    try:
        yield
    except LoweringError as error:
        if not is_ir(graph_path) or "onnxruntime" not in error.hint:
            raise
        message = error.message.removesuffix("".join(f"; {each}" for each in error.attempts))
        hint = f"only OpenVINO reads {FORMAT}: serve the ONNX file that the graph was made from"
        raise LoweringError(message, attempts=error.attempts, hint=hint) from error


def _properties(graph_path: Path, config: SessionConfig) -> dict[str, Any]:
    """Return OpenVINO's properties for a graph.

    Raises:
        LoweringError: As `_options`.
    """
    properties = _options(config)
    if is_ir(graph_path):
        # OpenVINO lowers its own format itself. Activations are quantized only if the graph says so: by default
        # OpenVINO (2026.4) quantizes them beside compressed weights, which changed two products of 512 by 0.7%.
        properties["INFERENCE_PRECISION_HINT"] = _HINTS.get(config.precision, "f32")
        properties["DYNAMIC_QUANTIZATION_GROUP_SIZE"] = 0
    return properties


def _options(config: SessionConfig) -> dict[str, Any]:
    """Return OpenVINO's properties for a configuration.

    Raises:
        LoweringError: An option requests another device than the CPU.
    """
    if config.options.get("device_type", "CPU") != "CPU":
        raise LoweringError(
            "OpenVINO serves the CPU here",
            attempts=(f"device_type must be CPU, got '{config.options['device_type']}'",),
        )
    options: dict[str, Any] = {
        # The default on many CPUs is bf16. With f32, tensors that are bf16 or fp16 in the graph keep their type.
        "INFERENCE_PRECISION_HINT": "f32",
        "INFERENCE_NUM_THREADS": config.threads,
        "NUM_STREAMS": str(config.streams),
        # Pinning would put the threads of all instances onto the same first cores.
        "ENABLE_CPU_PINNING": False,
    }
    if "cache_dir" in config.options:
        options["CACHE_DIR"] = config.options["cache_dir"]
    return options
