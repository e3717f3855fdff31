"""Choose who computes a version: a Python instance of graphkiln or Triton's C++ `onnxruntime` backend.

The C++ backend answers small models sooner and starts faster, because no process and no copy through shared memory lies
between Triton and ONNX Runtime. It takes a version whose answers would be the same; the reason against it is a sentence
for `explain`. The graph is read by `repository.onnx_outline`, since this runs in the server's supervisor.

Source: Triton ONNX Runtime backend, `src/onnxruntime.cc` (r24.10): the keys of a configuration that it reads.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from graphkiln_backend.engines import hardware
from graphkiln_backend.graph.dtypes import DType
from graphkiln_backend.graph.errors import GraphkilnError, RepositoryError
from graphkiln_backend.graph.files import read_bytes
from graphkiln_backend.graph.manifest import Manifest
from graphkiln_backend.graph.precision import Precision
from graphkiln_backend.lowering.settings import (
    ACCELERATOR_ORIGIN,
    CUDA_OPTIONS,
    PUBLISHED_KEYS,
    SEATS,
    Override,
    Settings,
)
from graphkiln_backend.lowering.settings import AUTO as ANY_ENGINE
from graphkiln_backend.repository.config import DROP_IN_BACKEND, ModelConfigProto, pb
from graphkiln_backend.repository.model_config import ModelConfig
from graphkiln_backend.repository.onnx_outline import GraphOutline, read_outline
from graphkiln_backend.repository.version import read_manifest
from graphkiln_backend.system.resources import usable_cores

AUTO, NATIVE, PYTHON = SEATS

_LIBRARY = f"libtriton_{DROP_IN_BACKEND}.so"
_RUNTIME = "libonnxruntime.so"
_MOST_LIBRARY_BYTES = 1 << 26  # of the backend, which is 1 MB
_VERSION = re.compile(r"(\d+\.\d+\.\d+)$")
_SYMBOL_VERSION = re.compile(rb"VERS_(\d+\.\d+\.\d+)\0")
# Newest opset, opset of ai.onnx.ml and IR version that ONNX Runtime loads, by the first release with these limits; the
# releases from 1.15 to 1.32 were tried with graphs of one node. Source: ONNX Runtime, "Compatibility"; ONNX,
# docs/Versioning.md.
_LIMITS = {
    (1, 15): (19, 3, 9),
    (1, 17): (20, 4, 9),
    (1, 18): (21, 5, 10),
    (1, 21): (22, 5, 10),
    (1, 23): (23, 5, 11),
    (1, 24): (25, 5, 13),
    (1, 25): (26, 5, 13),
    (1, 32): (28, 5, 14),
}
_INSTALL = "leave seat out, or install it: NVIDIA's image of Triton has it, and --backend-directory names another one"
_IMAGE_DIMS = 3
# Session entries that do not change answers; the others of `session.*` are not read by the C++ backend (r24.10).
_HARMLESS_ENTRY = "session.use_device_allocator_for_initializers"
_ENVIRONMENT_KEY = "EXECUTION_ENV_PATH"
# Setting `conv_search` -> `cudnn_conv_algo_search` of the C++ backend.
_CONV_SEARCHES = {"exhaustive": "0", "heuristic": "1", "default": "2"}


@dataclass(frozen=True, kw_only=True, slots=True)
class NativeBackend:
    """Triton's C++ `onnxruntime` backend.

    Attributes:
        library: Its library.
        version: Version of the ONNX Runtime that it loads, such as `1.32.0`; empty if unknown.
    """

    library: Path
    version: str = ""

    @property
    def title(self) -> str:
        """Name and version for people."""
        return f"Triton's C++ onnxruntime backend, ONNX Runtime {self.version or 'of an unknown version'}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Seat:
    """Seat of a model.

    Attributes:
        native: True for the C++ backend.
        reason: Name of that backend, or why a Python instance of graphkiln computes.
        requested: The settings ask for this seat.
    """

    native: bool
    reason: str
    requested: bool = False

    def __str__(self) -> str:
        return f"{NATIVE} ({self.reason})" if self.native else f"{PYTHON}: {self.reason}"


def find_native_backend(folders: Sequence[Path]) -> NativeBackend | None:
    """Find the C++ backend as Triton would: the first folder that holds a backend of its name decides.

    Args:
        folders: Backend directories, in order of precedence.
    """
    found = next((folder / DROP_IN_BACKEND for folder in folders if (folder / DROP_IN_BACKEND).is_dir()), None)
    if found is None or not (found / _LIBRARY).is_file():
        return None
    return NativeBackend(library=found / _LIBRARY, version=_runtime_version(found / _LIBRARY))


def _runtime_version(library: Path) -> str:
    """Return the version of ONNX Runtime by the name of the file beside a library, else by the symbols it needs."""
    for folder in dict.fromkeys((library.parent, library.resolve().parent)):
        for path in sorted(folder.glob(f"{_RUNTIME}*")):
            for name in (path.name, path.resolve().name):
                if found := _VERSION.search(name):
                    return found[1]
    with suppress(OSError):
        if symbol := _SYMBOL_VERSION.search(read_bytes(library, _MOST_LIBRARY_BYTES)):
            return symbol[1].decode()
    return ""


def choose_seat(
    config: ModelConfigProto,
    versions: Sequence[Path],
    overrides: Sequence[Override],
    backend: NativeBackend | None,
    *,
    recorded: bool = False,
    needed: str = "",
) -> Seat:
    """Choose who computes the versions of a model.

    Args:
        config: Completed configuration, before `guard_batch`.
        versions: Folders of the versions to serve.
        overrides: Settings of the command line.
        backend: The C++ backend, or None.
        needed: Why `seat: auto` needs a Python instance, such as a rollout; empty if it does not.
        recorded: Whether requests are recorded (`serve --record`); `seat: native` takes precedence.

    Returns:
        The seat. A Python instance is also chosen if the settings are invalid or a file is damaged: it reports the
        error.

    Raises:
        RepositoryError: `seat: native` is requested, and only graphkiln can serve the model.
    """
    model = ModelConfig.from_protobuf(config, has_gpu=bool(hardware.gpus()))
    try:
        settings = Settings.from_config(model, model.device, overrides)
    except RepositoryError as error:
        return Seat(native=False, reason=f"the settings are not valid: {error.message}")
    asked, origin = settings.seat, settings.origins.get("seat", "")
    if asked == PYTHON:
        return Seat(native=False, reason=f"requested by {origin}")
    if needed and asked != NATIVE:
        return Seat(native=False, reason=needed)
    if recorded and asked != NATIVE:
        return Seat(native=False, reason="requests are recorded, which only graphkiln does")
    if backend is None:
        reason, hint = "Triton's C++ onnxruntime backend is not installed", _INSTALL
    else:
        case = _Case(config=config, model=model, settings=settings, backend=backend, requested=asked == NATIVE)
        reason, hint = next(case.reasons(versions), ""), "leave seat out: graphkiln then computes it"
        if not reason:
            return Seat(native=True, reason=backend.title, requested=asked == NATIVE)
    if asked == NATIVE:
        raise RepositoryError(f"{origin} of '{config.name}' is {NATIVE}, but {reason}", hint=hint)
    return Seat(native=False, reason=reason)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Case:
    """A model and the C++ backend; its methods yield the reasons against computing the one with the other.

    Attributes:
        config: Completed configuration.
        model: The same configuration, read.
        settings: Settings of the model.
        backend: The C++ backend.
        requested: Whether `seat: native` is set: what changes no answer is no reason then.
    """

    config: ModelConfigProto
    model: ModelConfig
    settings: Settings
    backend: NativeBackend
    requested: bool

    def reasons(self, versions: Sequence[Path]) -> Iterator[str]:
        """Yield all reasons, the cheap ones first."""
        if self.model.device.is_gpu and not self.requested:
            yield f"not yet run on a GPU: seat: {NATIVE} asks for it"
        yield from self._of_settings()
        yield from self._of_config()
        if not versions:
            yield "there is no version"
        graph_files = set()
        for version in versions:
            try:
                manifest = read_manifest(version)
                graph_files.add(manifest.graph_file if manifest else "")
                yield from self._of_version(version, manifest)
            except (GraphkilnError, OSError) as error:
                yield f"version {version.name} cannot be read: {error}"
        if len(graph_files) > 1:
            yield f"the graph files of the versions have different names: {', '.join(sorted(graph_files))}"

    def _of_settings(self) -> Iterator[str]:
        settings, engine = self.settings, self.settings.engine
        # On a GPU the C++ backend has the accelerator `tensorrt`, too.
        accelerated = self.model.device.is_gpu and settings.origins.get("engine", "").startswith(ACCELERATOR_ORIGIN)
        if engine == ANY_ENGINE and not self.requested:
            yield "engine: auto measures the engines, which only graphkiln does"
        if engine not in ("", ANY_ENGINE, DROP_IN_BACKEND) and not accelerated:
            yield f"the engine {engine} is graphkiln's"
        only_ours = {
            "streams": settings.streams > 1,
            "parallel": settings.parallel is not None,
            "fallback": bool(settings.fallback),
            "providers": bool(settings.providers),
            "op_library_filename": bool(self.model.op_libraries),
            _ENVIRONMENT_KEY: _ENVIRONMENT_KEY in self.model.parameters,
        }
        yield from (f"{name} is set, which only graphkiln uses" for name, is_set in only_ours.items() if is_set)
        if not settings.self_test:
            yield "self_test is off, but the C++ backend computes only what was proven"
        unread = settings.tuning.config_entries.keys() - {_HARMLESS_ENTRY}
        yield from (f"the C++ backend does not read {key}" for key in sorted(unread))

    def _of_config(self) -> Iterator[str]:
        config = self.config
        only_ours = {
            "decoupled": config.model_transaction_policy.decoupled,
            "sequence_batching": config.HasField("sequence_batching"),
            "batch_input": config.batch_input,
            "batch_output": config.batch_output,
            "allow_ragged_batch": any(tensor.allow_ragged_batch for tensor in config.input),
        }
        yield from (f"{name} is set, which only graphkiln handles" for name, is_set in only_ours.items() if is_set)
        for tensor in config.input:
            dtype = DType.from_config(tensor.data_type)
            if tensor.optional:
                yield f"input '{tensor.name}' is optional: only graphkiln batches requests by the inputs they have"
            is_image = dtype is DType.UINT8 and len(tensor.dims) >= _IMAGE_DIMS
            if config.max_batch_size > 1 and not (dtype.is_float or is_image):
                yield (
                    f"a bad value of input '{tensor.name}' ({dtype}) would fail its neighbors in a batch: "
                    "graphkiln computes them again alone"
                )

    def _of_version(self, version: Path, manifest: Manifest | None) -> Iterator[str]:
        if manifest is None or manifest.golden is None:
            yield f"no golden samples: version {version.name} cannot be proven"
            return
        if not manifest.graph_file.endswith(".onnx"):
            yield f"{manifest.graph_file} of version {version.name} is not an ONNX graph"
            return
        tensors = (*manifest.signature.inputs, *manifest.signature.outputs)
        for spec in (spec for spec in tensors if not spec.shape and self.config.max_batch_size < 1):
            yield f"'{spec.name}' is a scalar, [1] in requests and [] in the graph: only graphkiln reshapes it"
        outline = read_outline(version / manifest.graph_file)
        saved = manifest.conversion.precision if manifest.conversion else outline.precision
        yield from self._of_precision(outline, saved)
        if outline.other_outputs:
            yield "an output is a sequence or a map, which graphkiln replaces by tensors"
        yield from self._of_age(outline)

    def _of_precision(self, outline: GraphOutline, saved: Precision) -> Iterator[str]:
        on_gpu, requested = self.model.device.is_gpu, self.settings.precision
        accelerated = on_gpu and self.settings.origins.get("precision", "").startswith(ACCELERATOR_ORIGIN)
        if requested and saved not in (requested, requested.kernels if on_gpu else None) and not accelerated:
            yield f"graphkiln lowers the graph from {saved} to {requested}"
        if saved is Precision.BF16 and not on_gpu:
            yield "ONNX Runtime has no bf16 kernels for CPUs"
        if outline.quantized and not on_gpu and hardware.saturates_products_of_bytes():
            yield "this CPU saturates sums of int8 products: only graphkiln computes them exactly"
        if outline.loops and not self.requested:
            yield "a loop of the graph may not end, and only graphkiln limits the time of a batch"
        if outline.blockwise:
            yield "only graphkiln multiplies weights of 4 bits exactly"

    def _of_age(self, outline: GraphOutline) -> Iterator[str]:
        version = self.backend.version
        release = tuple(map(int, version.split(".")[:2])) if version else ()
        if release < min(_LIMITS):
            if not self.requested:
                yield f"ONNX Runtime {version or 'of an unknown version'} may be too old for the graph"
            return
        limits = _LIMITS[max(known for known in _LIMITS if known <= release)]
        found = {"opset": outline.opset, "opset of ai.onnx.ml": outline.ml_opset, "IR version": outline.ir_version}
        for (name, needed), newest in zip(found.items(), limits, strict=True):
            if needed > newest:
                yield f"the graph's {name} {needed} is newer than ONNX Runtime {version}, which reads up to {newest}"


def native_config(
    config: ModelConfigProto, versions: Sequence[Path], overrides: Sequence[Override], *, cores: int | None = None
) -> ModelConfigProto:
    """Make the configuration for the C++ backend, with the settings and instances that graphkiln would have.

    Do not apply `guard_batch` to it: its additional dimension is removed by graphkiln only.

    Args:
        config: Completed configuration, before `guard_batch`; not changed.
        versions: Folders of the versions to serve; `choose_seat` chose the native seat for them.
        overrides: Settings of the command line.
        cores: Cores for all instances; None for all usable cores.

    Raises:
        GraphkilnError: The settings or the manifest are not valid.
    """
    model = ModelConfig.from_protobuf(config, has_gpu=bool(hardware.gpus()))
    settings = Settings.from_config(model, model.device, overrides)
    manifest = read_manifest(versions[-1])
    native = pb.ModelConfig()
    native.CopyFrom(config)
    native.backend, native.platform, native.runtime = DROP_IN_BACKEND, "", ""
    native.default_model_filename = manifest.graph_file if manifest else config.default_model_filename
    _set_instances(native, model)
    _set_accelerators(native, settings, model)
    _set_parameters(native, settings, model, cores or usable_cores())
    return native


def _set_instances(native: ModelConfigProto, model: ModelConfig) -> None:
    """Write the defaults of graphkiln: the C++ backend starts two instances on a CPU."""
    if not native.instance_group:
        native.instance_group.add()
    for group, counted in zip(native.instance_group, model.instance_groups, strict=True):
        on_gpu = counted.device is not None and counted.device.is_gpu
        group.kind = pb.ModelInstanceGroup.KIND_GPU if on_gpu else pb.ModelInstanceGroup.KIND_CPU
        group.count = counted.count


def _set_accelerators(native: ModelConfigProto, settings: Settings, model: ModelConfig) -> None:
    """Keep the accelerator in use; those for CPUs are another engine, which was not requested."""
    if not model.device.is_gpu:
        if model.cpu_accelerators:
            native.optimization.ClearField("execution_accelerators")
        return
    accelerators = native.optimization.execution_accelerators
    del accelerators.cpu_execution_accelerator[:]
    del accelerators.gpu_execution_accelerator[1:]
    first = next(iter(accelerators.gpu_execution_accelerator), None)
    if first is not None and settings.engine != first.name:
        del accelerators.gpu_execution_accelerator[:]
    options = {key: value for key, value in settings.options.get("onnxruntime", {}).items() if key not in CUDA_OPTIONS}
    cuda = accelerators.gpu_execution_accelerator.add(name="cuda")
    cuda.parameters["use_tf32"] = str(int(settings.precision is Precision.TF32))
    if settings.layout == "nhwc":
        cuda.parameters["prefer_nhwc"] = "1"
    for key, value in options.items():
        cuda.parameters[key] = value


def _set_parameters(native: ModelConfigProto, settings: Settings, model: ModelConfig, cores: int) -> None:
    """Keep what clients read, and write the session options that graphkiln would set."""
    tuning, on_gpu = settings.tuning, model.device.is_gpu
    threads = settings.threads or max(1, cores // model.processes)
    values = {
        "execution_mode": str(int(tuning.parallel)),
        "intra_op_thread_count": str(threads),
        "inter_op_thread_count": str(tuning.inter_threads or (threads if tuning.parallel else 1)),
        "enable_mem_arena": str(int(tuning.memory_arena)),
        "enable_mem_pattern": str(int(tuning.memory_pattern)),
    }
    if tuning.arena_shrinkage:
        values["memory.enable_memory_arena_shrinkage"] = tuning.arena_shrinkage
    values |= {key: value for key, value in tuning.config_entries.items() if key == _HARMLESS_ENTRY}
    if on_gpu:
        given = settings.options.get("onnxruntime", {})
        values |= {key: given[key] for key in CUDA_OPTIONS if key in given}
        if settings.conv_search:
            values["cudnn_conv_algo_search"] = _CONV_SEARCHES[settings.conv_search]
    for key in [key for key in native.parameters if key not in PUBLISHED_KEYS]:
        del native.parameters[key]
    for key, value in values.items():
        native.parameters[key].string_value = value
