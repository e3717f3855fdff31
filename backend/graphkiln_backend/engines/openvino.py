"""OpenVINO: the second engine for the CPU, often the fastest one.

The home of `import openvino`. On processors with AVX512-BF16 OpenVINO computes in bf16 by default: the precision is
always set, and read back from the compiled model.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
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
from graphkiln_backend.graph.signature import ANY_RANK, Dim, Signature, TensorSpec, free_dim
from graphkiln_backend.repository.onnx_file import read_signature
from graphkiln_backend.system.closing import Closeable

# OpenVINO (2026.4) computes some operators otherwise than ONNX, and in types of 32 bits at most. Such operators
# are mended in the graph that it has read, or refused.

DEVICE = "CPU"
_SUPPRESSION = "NonMaxSuppression"
_OVERLAP = 3  # index of its input that limits the overlap of boxes
# A positive float32 and this share of it add up to the next float32: between 0.75 and 1.5 of its last bit.
_NEXT = np.float32(1.5 * 2.0**-24)
# Made while this module is imported, which one thread does. The first array that OpenVINO (2026.4) shows fills a
# table, and gives Python's lock back meanwhile: a second thread then waits for the table with the lock in its hands,
# and the whole process hangs.
_FIRST_ARRAY = openvino.Tensor(np.zeros(1, np.float32)).data
_WIDE = (DType.INT64.numpy, DType.UINT64.numpy)
_WIDE_TYPES = (openvino.Type.i64, openvino.Type.u64)
_LEVELS_OF_7_BITS = 128
_NARROW = np.iinfo(np.int32)
_SHORT_TYPES = (openvino.Type.i8, openvino.Type.i16)
_WINDOW = b"_window_size"  # the end of the names of both attributes of `Attention`
# Operations in whose outputs a constant that was cut off shows.
_COMPUTED_WITH = frozenset(
    (
        *("Add", "Subtract", "Multiply", "Divide", "Mod", "FloorMod", "Power", "Gather", "Select"),
        *("BitwiseAnd", "BitwiseOr", "BitwiseXor"),
    )
)


def open_core() -> openvino.Core:
    """Make a core, and load its CPU plugin in another thread, which then ends.

    The plugin replaces the signal stack of the thread that loads it, and puts the former one back when it ends (seen
    with 2026.4 on a processor with AVX512). Of two that end in another order than last in, first out, one puts back
    what the other has freed: the next signal, such as Ctrl-C, then kills the process. A thread that is over has no
    signals.
    (One core for all sessions is no way out: there, `infer` crashed after other sessions had ended.)
    """
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(_load_plugin).result()


def _load_plugin() -> openvino.Core:
    core = openvino.Core()
    core.get_property(DEVICE, "FULL_DEVICE_NAME")
    return core


def read_graph(core: openvino.Core, path: Path) -> openvino.Model:
    """Read a graph so that it computes what ONNX specifies.

    OpenVINO suppresses boxes that overlap by as much as the limit; ONNX those that overlap by more. With a limit of 0,
    which is ONNX's default, OpenVINO keeps a single box, and ONNX all that do not touch.

    Raises:
        RuntimeError: OpenVINO refuses it.
        LoweringError: It computes with a constant of more than 32 bits, or otherwise than ONNX specifies.
    """
    model = core.read_model(str(path))
    for operation in model.get_ordered_ops():
        _check_constant(operation)
        _check_integer_products(operation)
        _check_shift(operation)
        _check_window(operation, path)
        if operation.get_type_name() == _SUPPRESSION and len(operation.inputs()) > _OVERLAP:
            _raise_limit(operation.input(_OVERLAP))
    return model


def _check_constant(operation: openvino.Node) -> None:
    """Refuse a constant that OpenVINO would cut off to 32 bits: a hash, a time in nanoseconds.

    The end of a slice may be as large as it likes, so only those count that are computed with.

    Raises:
        LoweringError: There is one.
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
    """Refuse values of 8 bits on a CPU that cuts their sums of products off; 7 bits cannot overflow.

    Raises:
        LoweringError: This is one.
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
    """Refuse shifts of short signed integers: they become powers of two, which overflow otherwise than in ONNX.

    Raises:
        LoweringError: This is one.
    """
    if operation.get_type_name() == "Power" and operation.get_output_element_type(0) in _SHORT_TYPES:
        raise LoweringError(
            "OpenVINO shifts signed integers of 8 and 16 bits otherwise than ONNX specifies",
            attempts=(operation.get_friendly_name(),),
            hint="set engine: onnxruntime",
        )


def _check_window(operation: openvino.Node, path: Path) -> None:
    """Refuse attention within a window: OpenVINO leaves the window out, and what it has read does not show it.

    Raises:
        LoweringError: This is attention, and the file names a window.
    """
    if operation.get_type_name() != "ScaledDotProductAttention":
        return
    with path.open("rb") as file, mmap(file.fileno(), 0, access=ACCESS_READ) as content:
        if content.find(_WINDOW) >= 0:
            raise LoweringError(
                "OpenVINO leaves out the window of Attention",
                attempts=(operation.get_friendly_name(),),
                hint="set engine: onnxruntime",
            )


def _fits(values: AnyArray) -> bool:
    return not values.size or (int(values.min()) >= _NARROW.min and int(values.max()) <= _NARROW.max)


def _raise_limit(limit: openvino.Input) -> None:
    """Raise a limit to the next number: an overlap reaches that exactly where it is more than the limit."""
    source = limit.get_source_output()
    above = opset13.add(source, opset13.multiply(source, opset13.constant(_NEXT)))
    above = opset13.maximum(above, opset13.constant(np.finfo(np.float32).tiny))
    limit.replace_source_output(above.output(0))


def suppresses(compiled: openvino.CompiledModel) -> bool:
    """Return true where a compiled graph suppresses boxes."""
    operations = compiled.get_runtime_model().get_ordered_ops()
    return any(_SUPPRESSION in str(each.get_rt_info()["layerType"].astype(str)) for each in operations)


def check_types(signature: Signature) -> None:
    """Refuse a graph whose tensors are wider than what OpenVINO computes in.

    Raises:
        LoweringError: One of them is FP64: infinities would come back as the largest FP32.
    """
    wide = [spec.name for spec in (*signature.inputs, *signature.outputs) if spec.dtype is DType.FP64]
    if wide:
        raise LoweringError(
            "OpenVINO computes FP64 in FP32", attempts=(f"'{wide[0]}' is FP64",), hint="set engine: onnxruntime"
        )


def check_values(name: str, array: AnyArray, limit: int = LIMIT) -> None:
    """Refuse values that OpenVINO would cut off: it computes integers of 64 bits in 32.

    Args:
        name: The input.
        array: Its values.
        limit: Values without their sign must be less.

    Raises:
        SignatureError: One does not fit.
    """
    if not array.size or not (array.dtype in _WIDE or (limit < LIMIT and array.dtype.kind in "iu")):
        return
    lowest = -LIMIT if limit == LIMIT else 1 - limit
    least, most = int(array.min()), int(array.max())
    if least < lowest or most >= limit:
        raise SignatureError(
            f"input '{name}' does not fit: OpenVINO computes integers in 32 bits (engine: onnxruntime takes all)",
            expected=f"{lowest} to {limit - 1}",
            got=f"{least} to {most}",
        )


# OpenVINO gives the inputs and outputs of a compiled graph names that need not be those of the graph.


def first_specs(ports: Sequence[Any]) -> tuple[TensorSpec, ...]:
    """Describe tensors by the first of their names."""
    return tuple(spec_of(port, port.get_any_name()) for port in ports)


def match(ports: Sequence[Any], specs: Sequence[TensorSpec]) -> dict[str, int]:
    """Return input name -> index of its port; inputs that OpenVINO has dropped are left out."""
    if len(ports) == len(specs):
        by_name = [_index(ports, spec.name, index) for index, spec in enumerate(specs)]
        return {spec.name: index for spec, index in zip(specs, by_name, strict=True)}
    named = {spec.name: _index(ports, spec.name, -1) for spec in specs}
    return {name: index for name, index in named.items() if index >= 0}


def _index(ports: Sequence[Any], name: str, otherwise: int) -> int:
    return next((index for index, port in enumerate(ports) if name in port.get_names()), otherwise)


def spec_of(port: Any, name: str) -> TensorSpec:
    """Describe a tensor as OpenVINO sees it.

    Raises:
        ManifestError: Triton cannot carry its element type.
    """
    dtype = DType.from_openvino(port.get_element_type().get_type_name())
    shape = port.get_partial_shape()
    if shape.rank.is_dynamic:
        return TensorSpec(name=name, dtype=dtype, shape=(ANY_RANK,))
    return TensorSpec(name=name, dtype=dtype, shape=tuple(_dim(dim, name, axis) for axis, dim in enumerate(shape)))


def _dim(dim: Any, tensor: str, axis: int) -> Dim:
    return int(dim.get_length()) if dim.is_static else free_dim(tensor, axis)


_NOT_KERNELS = {"Parameter", "Result", "Input", "Output", "Constant", "Const", "Reorder"}
# Layers that multiply and add, as OpenVINO names them after its own rewriting.
_PRODUCTS = {"Convolution", "Deconvolution", "MatMul", "FullyConnected", "GroupConvolution", "BinaryConvolution"}
_COMPILED = "model.blob"  # the file in the entries of caches that exist
# The file beside it that marks that boxes are suppressed as in ONNX; the first entries do not have it.
_AS_ONNX = "as_onnx"
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


class OpenVinoEngine:
    """OpenVINO on the CPU. The graph's own types decide the precision: fp32, bf16, fp16 (where the CPU can), int8."""

    def probe(self, device: Device) -> Support:
        """Supports the CPU alone."""
        return Support(ok=False, reason=f"openvino serves cpu, not {device}") if device.is_gpu else Support(ok=True)

    def identity(self, config: SessionConfig) -> Mapping[str, str]:
        """See `engines.base.Engine.identity`."""
        return {"openvino": openvino.__version__, "options": str(sorted(_options(config).items()))}

    def compile(self, graph_path: Path, config: SessionConfig, folder: Path) -> None:
        """Write the compiled model as OpenVINO exports it.

        Raises:
            LoweringError: As `build`.
        """
        model, limits = _compile(graph_path, config)
        blob = model.export_model()
        write_limits(folder, limits)
        (folder / _COMPILED).write_bytes(blob.getvalue() if hasattr(blob, "getvalue") else blob)
        (folder / _AS_ONNX).touch()

    def build(self, graph_path: Path, config: SessionConfig, compiled: Path | None = None) -> OpenVinoSession:
        """Compiles a graph, or loads what was compiled.

        Raises:
            LoweringError: OpenVINO refuses the graph or an option, or computes otherwise than ONNX specifies.
        """
        if compiled is None:
            model, limits = _compile(graph_path, config)
        else:
            model, limits = _import(compiled / _COMPILED, config), _limits(graph_path, compiled)
            if suppresses(model) and not (compiled / _AS_ONNX).exists():
                model, limits = _compile(graph_path, config)
        try:
            saved = read_signature(graph_path) if graph_path.exists() else None  # what is compiled needs no graph
            session = OpenVinoSession(model, config.streams, saved, limits)
        except (ManifestError, ValueError) as error:
            raise LoweringError(f"OpenVINO cannot serve {graph_path}", attempts=(str(error),)) from error
        check_types(session.signature)
        return session


class OpenVinoSession(Closeable):
    """A compiled graph; see `engines.base.Session`.

    Args:
        compiled: The model.
        streams: Parts of a batch that are computed in parallel, where every tensor has a row per sample.
        saved: The graph's tensors as they were saved. OpenVINO gives a tensor several names where it drops a node
            between them, and drops inputs whose values no output depends on; None for the names that it has first.
        limits: Input -> limit of its integers, where that is less than `openvino_integers.LIMIT`.

    Raises:
        ManifestError: One of its tensors is not one that Triton can carry.
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
        """Inputs and outputs as OpenVINO sees them; it keeps no names of varying dimensions."""
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
            self._signature.check(feeds)  # names a wrong input more clearly than OpenVINO
            raise ExecutionError(f"OpenVINO failed: {error}") from error
        return {name: self._typed(name, results[self._outputs[name]]) for name in names}

    def _fill(self, request: openvino.InferRequest, feeds: Mapping[str, AnyArray]) -> None:
        """Copy feeds into the request's own tensors; inputs that OpenVINO has dropped are left out.

        They are never shared with the caller: where an output is an input (behind a Cast that OpenVINO drops), it would
        be memory of an earlier request, or writable memory of the caller (2026.4). Its own way to copy converts dtypes
        and takes any shape, so both are checked here.

        Raises:
            SignatureError: An input is unknown, missing or does not fit, or holds what OpenVINO would cut off.
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
            # OpenVINO shows bf16 to numpy as another type of two bytes.
            memory = tensor.data.view(array.dtype) if array.dtype == DType.BF16.numpy else tensor.data
            memory[...] = array

    def _interrupt(self) -> None:
        for request in self._requests:
            request.cancel()  # between two operators, not inside a loop

    def _run_in_parallel(self, feeds: Mapping[str, AnyArray], names: Sequence[str]) -> dict[str, AnyArray]:
        """Split a batch into a part for each stream, and joins their outputs."""
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
            for request in started:  # none may go on reading inputs that the caller frees now
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
        """OpenVINO returns bf16 as another type of two bytes."""
        return array.view(DType.BF16.numpy) if name in self._bf16_outputs else array

    def placement(self, feeds: Mapping[str, AnyArray]) -> Placement:
        """Run the feeds and counts the kernels of the executed model, with the precision that each ran in."""
        self.run(feeds)
        kernels: Counter[KernelType] = Counter()
        products: Counter[KernelType] = Counter()
        for operation in self._compiled.get_runtime_model().get_ordered_ops():
            info = operation.get_rt_info()
            layer = str(info["layerType"].astype(str))
            if layer in _NOT_KERNELS:
                continue
            kernel_type = _KERNEL_TYPES.get(str(info["runtimePrecision"].astype(str)).lower(), "unknown")
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


def _compile(graph_path: Path, config: SessionConfig) -> tuple[openvino.CompiledModel, Mapping[str, int]]:
    """The compiled graph, and the limits of its inputs."""
    try:
        core = open_core()
        model = read_graph(core, graph_path)
        limits = find_limits(model)
        return core.compile_model(model, DEVICE, _options(config)), limits
    except (RuntimeError, ValueError, TypeError) as error:
        raise LoweringError(f"OpenVINO cannot load {graph_path}", attempts=(str(error),)) from error


def _limits(graph_path: Path, compiled: Path) -> Mapping[str, int]:
    """The limits of a compiled graph's inputs, which the first entries of caches do not hold."""
    known = read_limits(compiled)
    if known is None and graph_path.exists():
        return find_limits(read_graph(open_core(), graph_path))
    return known or {}


def _import(blob: Path, config: SessionConfig) -> openvino.CompiledModel:
    try:
        return open_core().import_model(blob.read_bytes(), DEVICE, _options(config))
    except (RuntimeError, ValueError, TypeError, OSError) as error:
        raise LoweringError(f"OpenVINO cannot load {blob}, which it compiled itself", attempts=(str(error),)) from error


def _options(config: SessionConfig) -> dict[str, Any]:
    """OpenVINO's properties for a configuration.

    Raises:
        LoweringError: An option requests a device that this engine does not offer.
    """
    if config.options.get("device_type", "CPU") != "CPU":
        raise LoweringError(
            "OpenVINO serves the CPU here",
            attempts=(f"device_type must be CPU, got '{config.options['device_type']}'",),
        )
    options: dict[str, Any] = {
        # Its own default on many CPUs is bf16. With f32, what the graph holds in bf16 or fp16 stays that.
        "INFERENCE_PRECISION_HINT": "f32",
        "INFERENCE_NUM_THREADS": config.threads,
        "NUM_STREAMS": str(config.streams),
        # Each process would pin its threads to the machine's first cores, all instances to the same ones.
        "ENABLE_CPU_PINNING": False,
    }
    if "cache_dir" in config.options:
        options["CACHE_DIR"] = config.options["cache_dir"]
    return options
