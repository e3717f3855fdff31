"""OpenVINO: the second engine for the CPU, often the fastest one.

OpenVINO (2026.4) deviates from ONNX for some operators, and computes in types of at most 32 bits. Such operators are
corrected in the graph that it has read, or refused (integers: `openvino_integers`). On processors with AVX512-BF16 it
computes in bf16 by default, so the precision is always set, and read back from the compiled model.

A graph in OpenVINO IR means what OpenVINO makes of it, so nothing is corrected there. What depends on the machine or on
the values of a request is refused for it, too: integers that need more than 32 bits, FP64, and products of bytes that
overflow.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from itertools import pairwise
from mmap import ACCESS_READ, mmap
from pathlib import Path
from typing import Any

import numpy as np
import openvino
from openvino import opset13

from graphkiln_backend.engines.base import KernelType, Placement, SessionConfig, Support
from graphkiln_backend.engines.compute_limit import current_limit
from graphkiln_backend.engines.hardware import saturates_products_of_bytes
from graphkiln_backend.engines.openvino_integers import LIMIT, find_limits, read_limits, write_limits
from graphkiln_backend.graph.device import Device
from graphkiln_backend.graph.dtypes import AnyArray, DType
from graphkiln_backend.graph.errors import ExecutionError, LoweringError, ManifestError, SignatureError
from graphkiln_backend.graph.precision import Precision
from graphkiln_backend.graph.signature import ANY_RANK, Signature, TensorSpec, free_dim
from graphkiln_backend.repository.openvino_ir import FORMAT, is_ir, read_ir
from graphkiln_backend.repository.version import read_graph_signature
from graphkiln_backend.system.closing import Closeable

DEVICE = "CPU"
_SUPPRESSION = "NonMaxSuppression"
_OVERLAP = 3  # index of its input that limits the overlap of boxes
# A positive float32 and this share of it add up to the next float32: between 0.75 and 1.5 of its last bit.
_NEXT = np.float32(1.5 * 2.0**-24)
# Created during the import, which a single thread runs. The first array that OpenVINO (2026.4) returns initializes a
# table with the GIL released: a second thread that waits for the table while holding the GIL would deadlock.
_FIRST_ARRAY = openvino.Tensor(np.zeros(1, np.float32)).data
_WIDE = (DType.INT64.numpy, DType.UINT64.numpy)
_WIDE_TYPES = (openvino.Type.i64, openvino.Type.u64)
_LEVELS_OF_7_BITS = 128
_NARROW = np.iinfo(np.int32)
_SHORT_TYPES = (openvino.Type.i8, openvino.Type.i16)
_WINDOW = b"_window_size"  # suffix of the names of both attributes of `Attention`
_OF_ATTENTION = {"ScaledDotProductAttention", "Softmax"}
# Operations whose outputs change if a constant input is truncated.
_COMPUTED_WITH = frozenset(
    (
        *("Add", "Subtract", "Multiply", "Divide", "Mod", "FloorMod", "Power", "Gather", "Select"),
        *("BitwiseAnd", "BitwiseOr", "BitwiseXor"),
    )
)
_NOT_KERNELS = {"Parameter", "Result", "Input", "Output", "Constant", "Const", "Reorder"}
# Layers that are products, by OpenVINO's names after its rewriting.
_PRODUCTS = {"Convolution", "Deconvolution", "MatMul", "FullyConnected", "GroupConvolution", "BinaryConvolution"}
_COMPILED = "model.blob"  # file name in existing cache entries
# Marks an entry with NonMaxSuppression corrected to ONNX; the oldest entries do not have it.
_AS_ONNX = "as_onnx"
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

    NonMaxSuppression of OpenVINO suppresses boxes whose overlap equals the limit; ONNX only those that exceed it. With
    a limit of 0, ONNX's default, OpenVINO keeps a single box, and ONNX all that do not touch.

    Raises:
        RuntimeError: OpenVINO refuses the graph.
        LoweringError: The graph computes with a constant of more than 32 bits, deviates from ONNX, or keeps a state.
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
    operations = model.get_ordered_ops()
    if is_onnx:
        _check_window(operations, path)
    for operation in operations:
        _check_constant(operation)
        _check_integer_products(operation)
        if not is_onnx:
            continue
        _check_shift(operation)
        if operation.get_type_name() == _SUPPRESSION and len(operation.inputs()) > _OVERLAP:
            _raise_limit(operation.input(_OVERLAP))
    return model


def _check_constant(operation: openvino.Node) -> None:
    """Refuse constants that OpenVINO would truncate to 32 bits, such as hashes or times in nanoseconds.

    Only constants in arithmetic count: the end of a slice may be arbitrarily large.

    Raises:
        LoweringError: The constant would be truncated.
    """
    if operation.get_type_name() != "Constant" or operation.get_output_element_type(0) not in _WIDE_TYPES:
        return
    users = {each.get_node().get_type_name() for each in operation.output(0).get_target_inputs()} & _COMPUTED_WITH
    if users and not _fits(operation.get_data()):
        raise LoweringError(
            "OpenVINO computes integers in 32 bits",
            attempts=(f"{min(users)} computes with a constant that takes more",),
            hint="set engine: onnxruntime",
        )


def _check_integer_products(operation: openvino.Node) -> None:
    """Refuse 8-bit quantization on a CPU that saturates sums of products; 7 bits cannot overflow.

    Raises:
        LoweringError: The operation quantizes to 8 bits.
    """
    if operation.get_type_name() != "FakeQuantize" or not saturates_products_of_bytes():
        return
    if operation.get_attributes()["levels"] > _LEVELS_OF_7_BITS:
        raise LoweringError(
            "OpenVINO's products of int8 overflow on this CPU, which has no VNNI instructions",
            attempts=(operation.get_friendly_name(),),
            hint="set engine: onnxruntime, which computes them without overflow here",
        )


def _check_shift(operation: openvino.Node) -> None:
    """Refuse shifts of short signed integers, which become powers of two and overflow differently than in ONNX.

    Raises:
        LoweringError: The operation is such a shift.
    """
    if operation.get_type_name() == "Power" and operation.get_output_element_type(0) in _SHORT_TYPES:
        raise LoweringError(
            "OpenVINO shifts signed integers of 8 and 16 bits otherwise than ONNX specifies",
            attempts=(operation.get_friendly_name(),),
            hint="set engine: onnxruntime",
        )


def _check_window(operations: Iterable[openvino.Node], path: Path) -> None:
    """Refuse windowed attention: OpenVINO (2026.4) drops the window, and its graph does not show it.

    OpenVINO translates attention into one operation, or, with `nonpad_kv_seqlen`, into products and a softmax.

    Raises:
        LoweringError: An operation may be attention, and the file has a window attribute.
    """
    if not _OF_ATTENTION & {operation.get_type_name() for operation in operations}:
        return
    with path.open("rb") as file, mmap(file.fileno(), 0, access=ACCESS_READ) as content:
        if content.find(_WINDOW) >= 0:
            raise LoweringError(
                "OpenVINO leaves out the window of Attention", attempts=(), hint="set engine: onnxruntime"
            )


def _fits(values: AnyArray) -> bool:
    return not values.size or (int(values.min()) >= _NARROW.min and int(values.max()) <= _NARROW.max)


def _raise_limit(limit: openvino.Input) -> None:
    """Raise a limit to the next float, so that "at least" means "more than" the original limit."""
    source = limit.get_source_output()
    above = opset13.add(source, opset13.multiply(source, opset13.constant(_NEXT)))
    above = opset13.maximum(above, opset13.constant(np.finfo(np.float32).tiny))
    limit.replace_source_output(above.output(0))


def suppresses(compiled: openvino.CompiledModel) -> bool:
    """Return true if a compiled graph has NonMaxSuppression."""
    operations = compiled.get_runtime_model().get_ordered_ops()
    return any(_SUPPRESSION in str(each.get_rt_info()["layerType"].astype(str)) for each in operations)


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


def check_values(name: str, array: AnyArray, limit: int = LIMIT) -> None:
    """Refuse integers that OpenVINO would truncate from 64 to 32 bits.

    Args:
        name: Name of the input.
        array: Its values.
        limit: Exclusive limit of the absolute values.

    Raises:
        SignatureError: A value does not fit.
    """
    if not array.size or not (array.dtype in _WIDE or (limit < LIMIT and array.dtype.kind in "iu")):
        return
    lowest = -LIMIT if limit == LIMIT else 1 - limit
    least, most = int(array.min()), int(array.max())
    if least < lowest or most >= limit:
        raise SignatureError(
            f"input '{name}' does not fit: OpenVINO computes integers in 32 bits, ONNX Runtime in 64",
            expected=f"{lowest} to {limit - 1}",
            got=f"{least} to {most}",
        )


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
        return {"openvino": openvino.__version__, "options": str(sorted(_options(config).items()))}

    def compile(self, graph_path: Path, config: SessionConfig, folder: Path) -> None:
        """Write the compiled model in OpenVINO's export format.

        Raises:
            LoweringError: As `build`.
        """
        with _hints_for(graph_path):
            model, limits = _compile(graph_path, config)
        blob = model.export_model()
        write_limits(folder, limits)
        (folder / _COMPILED).write_bytes(blob.getvalue() if hasattr(blob, "getvalue") else blob)
        (folder / _AS_ONNX).touch()

    def build(self, graph_path: Path, config: SessionConfig, compiled: Path | None = None) -> OpenVinoSession:
        """Compile a graph, or load a compiled one.

        Raises:
            LoweringError: OpenVINO refuses the graph or an option, or deviates from ONNX.
        """
        with _hints_for(graph_path):
            if compiled is None:
                model, limits = _compile(graph_path, config)
            else:
                model, limits = _import(compiled / _COMPILED, graph_path, config), _limits(graph_path, compiled)
                if suppresses(model) and not (compiled / _AS_ONNX).exists():
                    model, limits = _compile(graph_path, config)
            try:
                # A compiled model does not need the graph.
                saved = read_graph_signature(graph_path) if graph_path.exists() else None
                session = OpenVinoSession(model, config.streams, saved, limits)
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
        limits: Input -> limit of its integers, if less than `openvino_integers.LIMIT`.

    Raises:
        ManifestError: Triton does not support the type of a tensor.
    """

    def __init__(
        self,
        compiled: openvino.CompiledModel,
        streams: int = 1,
        saved: Signature | None = None,
        limits: Mapping[str, int] | None = None,
    ) -> None:
        self._compiled = compiled
        self._limits = limits or {}
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
            SignatureError: An input is unknown, missing, does not fit, or has values that OpenVINO would truncate.
        """
        self._signature.check(feeds)
        for name, array in feeds.items():
            check_values(name, array, self._limits.get(name, LIMIT))
            if name not in self._inputs:
                continue
            index = self._inputs[name]
            if array.ndim == 0:
                request.set_input_tensor(index, openvino.Tensor(np.array(array), shared_memory=False))
                continue
            tensor = request.get_input_tensor(index)
            if tuple(tensor.shape) != array.shape:
                tensor.shape = array.shape
            # OpenVINO exposes bf16 to numpy as another 2-byte dtype.
            memory = tensor.data.view(array.dtype) if array.dtype == DType.BF16.numpy else tensor.data
            memory[...] = array

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


def _compile(graph_path: Path, config: SessionConfig) -> tuple[openvino.CompiledModel, Mapping[str, int]]:
    """Return the compiled graph and the limits of its inputs."""
    try:
        core = open_core()
        model = read_graph(core, graph_path)
        limits = find_limits(model)
        return core.compile_model(model, DEVICE, _properties(graph_path, config)), limits
    except (RuntimeError, ValueError, TypeError) as error:
        raise LoweringError(f"OpenVINO cannot load {graph_path}", attempts=(str(error),)) from error


def _limits(graph_path: Path, compiled: Path) -> Mapping[str, int]:
    """Return the limits of a compiled graph's inputs; the oldest cache entries do not have them."""
    known = read_limits(compiled)
    if known is None and graph_path.exists():
        return find_limits(read_graph(open_core(), graph_path))
    return known or {}


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
