"""Load graphs in ONNX Runtime: providers, session options, and optimized copies shared by instances.

The CUDA provider is not yet run on a GPU: built from the documentation and tested without one; `scripts/gpu-check` is
the first run.
"""

from __future__ import annotations

import hashlib
import logging
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

import onnxruntime
from onnxruntime.capi import onnxruntime_pybind11_state as native

from graphkiln_backend.engines.base import SessionConfig, Support
from graphkiln_backend.engines.hardware import gpu, saturates_products_of_bytes
from graphkiln_backend.engines.onnxruntime.exact_products import has_integer_products, make_exact
from graphkiln_backend.graph.device import Device
from graphkiln_backend.graph.errors import EngineUnavailable, LoweringError, RepositoryError
from graphkiln_backend.graph.modules import LazyModule
from graphkiln_backend.graph.precision import Precision
from graphkiln_backend.repository.onnx_file import keep_inputs, opset_of, read_graph
from graphkiln_backend.system.closing import Closeable
from graphkiln_backend.system.locks import lock, lock_shared, try_lock

if TYPE_CHECKING:
    import onnx
else:
    onnx = LazyModule("onnx")

_log = logging.getLogger("graphkiln.engines")

CPU, CUDA = "CPUExecutionProvider", "CUDAExecutionProvider"
Provider = tuple[str, dict[str, str]]  # an execution provider's name and its options
_LEVELS = {
    "all": onnxruntime.GraphOptimizationLevel.ORT_ENABLE_ALL,
    "extended": onnxruntime.GraphOptimizationLevel.ORT_ENABLE_EXTENDED,
    "basic": onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC,
    "off": onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL,
}
# ONNX Runtime rounds activations to int8 before 4-bit weights multiply them unless this is set: an error of 1%, seen
# with 1.31.
_EXACT_PRODUCTS = {"session.qdq_matmulnbits_accuracy_level": "1"}
# Required if `hardware.saturates_products_of_bytes`: sums of int8 products are wrong without it, by up to 45%. On other
# CPUs it changes no sum, disables the fast instructions (ResNet-50 takes three times as long with AVX512-VNNI, seen
# with 1.32), and refuses graphs in which an int8 weight has two readers.
_PRECISE = "session.x64quantprecision"
# On x86 ONNX Runtime makes int8 activations uint8, which has faster kernels. Since opset 21 it forgets the attribute
# `output_dtype` of QuantizeLinear nodes that it inserted itself, and then refuses its own graph (seen with 1.32).
_KEEP_INT8 = "session.qdqisint8allowed"
_QUANTIZING = "QuantizeLinear"  # in the error, also as DequantizeLinear
_FOLDER = "session.model_external_initializers_file_folder_path"  # weight files of a graph loaded from memory
_SHARED_BYTES = "Attempt to replace the existing tensor"  # prefix of the error for an int8 weight with two readers
# Errors of ONNX Runtime, which have no common base class.
ERRORS = (
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
_NOT_LOADED_HINT = "build it for this machine and this version of ONNX Runtime; `ldd` tells what else it needs"
_HINTS = {
    "Failed to construct locale": "the graph changes the case of text by rules of a locale that this machine lacks: "
    "apt-get install locales && localedef -i en_US -f UTF-8 en_US.UTF-8",
    "is not a registered function/op": "if it is a custom operator, name its library in config.pbtxt: "
    'model_operations { op_library_filename: "/path/to/library.so" }',
}
_NO_KERNEL = "NOT_IMPLEMENTED"
_OLDEST = 7  # source: ONNX Runtime, docs/OperatorKernels.md: the CPU has no kernels for older operator sets
_OPERATOR_SINCE = re.compile(r"implementation for \w+\((\d+)\)")  # the version of an operator without a kernel
_NEWEST = 25  # seen with 1.32: it has no kernels of most operators that ONNX changed later, and reads such graphs
_GRAPH = "graph.onnx"
WEIGHTS = "weights.bin"
_ALIGNMENT = 64  # bytes of an AVX-512 register
_PREFIX = "prepacked_"


def probe_gpu(provider: str, device: Device) -> Support:
    """Check that this build of ONNX Runtime has the provider, and that the GPU exists."""
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


def select_provider(config: SessionConfig) -> Provider:
    """Choose the CPU or CUDA provider for a configuration; the user's options override ours.

    Source: ONNX Runtime, "CUDA Execution Provider" (configuration options).
    """
    if not config.device.is_gpu:
        return CPU, {}
    options = {"device_id": str(config.device.index), "use_tf32": str(int(config.precision is Precision.TF32))}
    if config.layout == "nhwc":
        options["prefer_nhwc"] = "1"
    if config.conv_search:
        options["cudnn_conv_algo_search"] = config.conv_search.upper()
    return CUDA, {**options, **config.options}


def session_options(config: SessionConfig) -> onnxruntime.SessionOptions:
    """Create the session options of a configuration.

    Raises:
        LoweringError: As `register`.
    """
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
    exact = _EXACT_PRODUCTS | ({_PRECISE: "1"} if saturates_products_of_bytes() else {})
    for name, value in {**spinning, **exact, **tuning.config_entries}.items():
        options.add_session_config_entry(name, value)
    register(options, config.op_libraries)
    return options


def disable_optimizations(options: onnxruntime.SessionOptions) -> None:
    """Turn off all graph optimizations."""
    options.graph_optimization_level = _LEVELS["off"]


def register(options: onnxruntime.SessionOptions, libraries: Sequence[str]) -> None:
    """Load libraries of custom operators into a future session.

    Raises:
        LoweringError: A library does not load, or has no operators.
    """
    for library in libraries:
        try:
            options.register_custom_ops_library(library)
        except Exception as error:  # one of ONNX Runtime's own
            raise LoweringError(
                f"the library of custom operators {library} does not load",
                attempts=(str(error),),
                hint=_NOT_LOADED_HINT,
            ) from error


def digest(libraries: Sequence[str]) -> str:
    """Return a digest of libraries, or empty; a bare name that the dynamic loader resolves counts by its name only."""
    found = hashlib.sha256()
    for library in libraries:
        found.update(f"{library}\n".encode())
        if Path(library).is_file():
            found.update(hashlib.sha256(Path(library).read_bytes()).digest())
    return found.hexdigest() if libraries else ""


def open_session(
    graph_path: Path, options: onnxruntime.SessionOptions, providers: list[Provider]
) -> onnxruntime.InferenceSession:
    """Load a graph, and check that it runs on the first provider.

    Raises:
        LoweringError: ONNX Runtime refuses the graph or chooses another provider.
    """
    # Errors on the CPU and of plugins are raised; a GPU provider that does not start is only logged.
    options.log_severity_level = 4 if providers[0][0] == CPU or _has_plugins(options) else 3
    try:
        session = _load(graph_path, options, providers)
    except ERRORS as error:
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
    chosen = None if _has_plugins(options) else providers  # the options name plugins
    load = partial(onnxruntime.InferenceSession, sess_options=options, providers=chosen, enable_fallback=0)
    if providers[0][0] == CPU and saturates_products_of_bytes():
        load_file = partial(_load_exact, load, graph_path, options)
    else:
        load_file = partial(load, str(graph_path))
    try:
        return load_file()
    except ERRORS as error:
        if _QUANTIZING not in str(error) or options.graph_optimization_level == _LEVELS["off"]:
            raise
        _log.info("%s: int8 activations stay int8, because ONNX Runtime fails to convert them: %s", graph_path, error)
        _set(options, _KEEP_INT8, "1")
        return load_file()


def _has_plugins(options: onnxruntime.SessionOptions) -> bool:
    return hasattr(options, "has_providers") and bool(options.has_providers())  # since ONNX Runtime 1.24


def _load_exact(
    load: partial[onnxruntime.InferenceSession], graph_path: Path, options: onnxruntime.SessionOptions
) -> onnxruntime.InferenceSession:
    if not has_integer_products(graph_path):
        try:
            return load(str(graph_path))
        except native.Fail as error:
            if _SHARED_BYTES not in str(error):
                raise
    exact = make_exact(graph_path)
    _set(options, _FOLDER, str(graph_path.parent))
    if exact.signed:
        _set(options, _PRECISE, "0")
    return load(exact.model)


def _set(options: onnxruntime.SessionOptions, name: str, value: str) -> None:
    """Set an entry unless it has the value already: ONNX Runtime warns about each overwritten entry."""
    with suppress(RuntimeError):  # it is not set
        if options.get_session_config_entry(name) == value:
            return
    options.add_session_config_entry(name, value)


def hint_for(error: str, graph_path: Path) -> str:
    """Return a hint for an error of ONNX Runtime, or empty."""
    known = next((hint for words, hint in _HINTS.items() if words in error), "")
    if known or _NO_KERNEL not in error:
        return known
    try:
        opset = opset_of(read_graph(graph_path))
    except RepositoryError:
        return ""
    since = _OPERATOR_SINCE.search(error)
    if 0 < opset < _OLDEST:
        problem, remedy = f"ONNX Runtime computes those from {_OLDEST} on", "raise it"
    elif since and int(since[1]) > _NEWEST:
        problem, remedy = f"ONNX Runtime {onnxruntime.__version__} lacks operators that are new in it", "lower it"
    else:
        return ""
    version = _NEWEST if remedy == "lower it" else 18
    how = f"export it again, or {remedy} with onnx.version_converter.convert_version(model, {version})"
    return f"the graph is of operator set {opset}, and {problem}: {how}"


def save_optimized(graph_path: Path, options: onnxruntime.SessionOptions, target: Path) -> None:
    """Write the graph as optimized for the CPU with these options, and its weights to `WEIGHTS` beside it.

    Raises:
        LoweringError: ONNX Runtime refuses the graph.
    """
    options.optimized_model_filepath = str(target)
    options.add_session_config_entry("session.optimized_model_external_initializers_file_name", WEIGHTS)
    options.add_session_config_entry("session.optimized_model_external_initializers_min_size_in_bytes", "1024")
    session = open_session(graph_path, options, [(CPU, {})])
    # For a graph of IR version 3, constants folded by ONNX Runtime would become required inputs.
    keep_inputs(target, {node.name for node in (*session.get_inputs(), *session.get_overridable_initializers())})
    align_prepacked(target, target.with_name(WEIGHTS))


class SharedWeights(Closeable):
    """An optimized copy of a graph on disk: written by the first process that needs it, removed by the last one.

    Each instance is a process with its own copy of the weights, and a second one if the runtime repacks them. A copy
    with its repacked weights in a file is memory-mapped instead, so that the pages are shared. With ResNet-50 and two
    instances this takes 104 MB each instead of 281 MB; loading takes 0.01 s instead of 1 s.

    Args:
        folder: Folder of copies, for this machine and run only, since copies depend on the processor.
        graph_path: The graph; a change of it or of a file beside it makes a new copy.
        options: Everything else that the copy depends on.
        save: Writes the copy to a path, and its weights to `WEIGHTS` beside it.

    Raises:
        OSError: The folder cannot be written.
    """

    def __init__(self, folder: Path, graph_path: Path, options: str, save: Callable[[Path], None]) -> None:
        self._target = folder / _key(graph_path, options)
        self._lock = folder / f"{self._target.name}.lock"
        with self._locked():
            if not self._target.exists():
                partial = self._target.with_suffix(".partial")
                shutil.rmtree(partial, ignore_errors=True)  # left by a process that died
                try:
                    partial.mkdir()
                    save(partial / _GRAPH)
                    partial.rename(self._target)
                except BaseException:
                    shutil.rmtree(partial, ignore_errors=True)  # it may have filled the disk
                    raise
            # The lock of a process that dies is released, so no user count is needed.
            self._use = (self._target / _GRAPH).open("rb")
            lock_shared(self._use)

    @property
    def path(self) -> Path:
        """The graph of the copy."""
        return self._target / _GRAPH

    def close(self) -> None:
        """Release the copy. Call it once."""
        with self._locked(), self._use:
            if try_lock(self._use):
                shutil.rmtree(self._target)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        with self._lock.open("w") as file:
            lock(file)
            yield


def _key(graph_path: Path, options: str) -> str:
    """Return the name of a copy, from the options and the name, size and time of all files of the graph's folder."""
    digest = hashlib.sha256(options.encode())
    for path in sorted(graph_path.resolve().parent.rglob("*")):
        facts = path.stat() if path.exists() else path.lstat()  # a dangling link does not matter
        digest.update(f"{path!a}|{facts.st_size}|{facts.st_mtime_ns}\n".encode())
    return digest.hexdigest()[:32]


def align_prepacked(graph: Path, weights: Path) -> None:
    """Align repacked weights to multiples of 64 bytes.

    ONNX Runtime (1.31) writes repacked weights after their tensor and does not align blobs below 1 MB, but its AVX and
    AVX-512 kernels require aligned addresses and crash otherwise. Unaligned blobs are copied to the end of the file.
    Source of the format, `KEY|OFFSET;LENGTH;CHECKSUM[|...]`: onnxruntime/core/framework/tensor_external_data_info.cc.

    Args:
        graph: The graph.
        weights: The file of its weights.

    Raises:
        OSError: A file cannot be read or written.
    """
    if not weights.exists():
        return
    model = onnx.load(str(graph), load_external_data=False)
    changed = False
    with weights.open("r+b") as file:
        for entry in _entries(model.graph):
            key, *blobs = entry.value.split("|")
            moved = "|".join([key, *(_moved(blob, file) for blob in blobs)])
            changed = changed or moved != entry.value
            entry.value = moved
    if changed:
        graph.write_bytes(model.SerializeToString())


def _entries(graph: onnx.GraphProto) -> Iterator[onnx.StringStringEntryProto]:
    for tensor in graph.initializer:
        yield from (entry for entry in tensor.external_data if entry.key.startswith(_PREFIX))
    for node in graph.node:
        for attribute in node.attribute:
            for inner in (*attribute.graphs, *([attribute.g] if attribute.HasField("g") else [])):
                yield from _entries(inner)


def _moved(blob: str, file: BinaryIO) -> str:
    """Return the position of an aligned blob, or copy the blob to the end of the file."""
    offset, length, *rest = blob.split(";")
    if int(offset) % _ALIGNMENT == 0:
        return blob
    file.seek(int(offset))
    content = file.read(int(length))
    target = -(-file.seek(0, 2) // _ALIGNMENT) * _ALIGNMENT
    file.seek(target)
    file.write(content)
    return ";".join([str(target), length, *rest])
