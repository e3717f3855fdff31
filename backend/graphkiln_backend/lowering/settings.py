"""Settings of a model as one typed object: every key of its configuration is honored or refused with a reason.

Precedence, highest first: `--set MODEL.key=value`, `--enable-ENGINE MODEL`, `parameters` of config.pbtxt, its `xrt`
parameter, its execution accelerator. Overridden values are listed with the reason.

Beside graphkiln's own keys (`engine`, `precision`, ...) those of Triton's C++ `onnxruntime` and `openvino` backends and
of oneflow-serving are accepted, so that their repositories work unchanged. Unknown keys, which they ignore, are errors
here.

Source: Triton ONNX Runtime backend, README ("Model Config Options"); Triton OpenVINO backend, README ("Parameters");
oneflow-serving, `xrt` parameter.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

from graphkiln_backend.engines.base import GraphLevel, SessionTuning
from graphkiln_backend.graph.contract import CONTRACTS, GRAPHS
from graphkiln_backend.graph.device import Device, Parallelism
from graphkiln_backend.graph.errors import RepositoryError
from graphkiln_backend.graph.image_model import ACCEPT_IMAGES, IMAGE_MODEL
from graphkiln_backend.graph.precision import Precision
from graphkiln_backend.graph.preprocess import PREPROCESS
from graphkiln_backend.graph.task import RANKING, TASK
from graphkiln_backend.graph.text import did_you_mean, read_size
from graphkiln_backend.repository.batch_tensors import TEXT_ID_PARAMETER
from graphkiln_backend.repository.config import IDLE_CORES, OPENVINO_BACKEND
from graphkiln_backend.repository.model_config import Accelerator, ModelConfig

T = TypeVar("T")

AUTO = "auto"  # as an engine: try all, choose the fastest
LAYOUTS = ("nchw", "nhwc")
SEATS = ("auto", "native", "python")  # who computes, see `lowering.seat`
CONV_SEARCHES = ("exhaustive", "heuristic", "default")
# `optimization.graph.level` -> how far ONNX Runtime rewrites the graph.
GRAPH_LEVELS: dict[int, GraphLevel] = {0: "all", -1: "basic", 1: "extended", 2: "off"}

# Keys of `parameters`.
OWN_KEYS = (
    *("engine", "precision", "layout", "conv_search", "threads", "streams", "self_test", "fallback", "parallel"),
    *("seat", "providers"),
)
SESSION_KEYS = (
    "execution_mode",
    "intra_op_thread_count",
    "inter_op_thread_count",
    "enable_mem_arena",
    "enable_mem_pattern",
    "memory.enable_memory_arena_shrinkage",
)
SESSION_PREFIX = "session."  # prefix of ONNX Runtime's own session entries, which are passed through
PROVIDER_OPTION = re.compile(r"ep\.[a-z0-9]+executionprovider[^.]*\..+")  # its entries for options of plugins
CUDA_KEYS = ("cudnn_conv_algo_search", "gpu_mem_limit", "arena_extend_strategy", "do_copy_in_default_stream")
CUDA_OPTIONS = CUDA_KEYS[1:]  # passed through to the CUDA provider; the first key is the setting `conv_search`
TRITON_KEYS = ("EXECUTION_ENV_PATH", "FORCE_CPU_ONLY_INPUT_TENSORS", "TRITON_SKIP_DLPACK")  # of its Python backend
UNREAD_KEYS = ("execute_delay_ms",)  # in Triton's example `simple_dyna_sequence`; no ONNX backend reads it
PUBLISHED_KEYS = (
    *(CONTRACTS, GRAPHS, PREPROCESS, RANKING, TASK, TEXT_ID_PARAMETER, ACCEPT_IMAGES, IMAGE_MODEL),
    IDLE_CORES,
)
# Keys that have no effect when a user writes them.
_NOT_OFFERED = frozenset((*TRITON_KEYS, *UNREAD_KEYS, *PUBLISHED_KEYS))
KNOWN_KEYS = (*OWN_KEYS, *SESSION_KEYS, *CUDA_KEYS, *TRITON_KEYS, *UNREAD_KEYS, "xrt", *PUBLISHED_KEYS)

# Keys of Triton's `openvino` backend and of OpenVINO Model Server's `plugin_config` that are settings here, the others
# with the reason why they have no effect or are refused.
OPENVINO_SETTINGS = {
    "INFERENCE_NUM_THREADS": "threads",
    "NUM_STREAMS": "streams",
    "INFERENCE_PRECISION_HINT": "precision",
    "HINT_BF16": "precision",
}
OPENVINO_DEVICE = "TARGET_DEVICE"
OPENVINO_UNUSED = {
    "PERFORMANCE_HINT": "threads and streams are set instead",
    "PERFORMANCE_HINT_NUM_REQUESTS": "threads and streams are set instead",
    "COMPILATION_NUM_THREADS": "graphs are compiled once, and kept in the artifact cache",
    "CACHE_DIR": "graphs are compiled once, and kept in the artifact cache",
    "ENABLE_CPU_PINNING": "threads are never pinned, since instances would share the same cores",
    "ENABLE_HYPER_THREADING": "threads are set instead",
    "SCHEDULING_CORE_TYPE": "threads are set instead",
    "EXECUTION_MODE_HINT": "the precision is set instead",
    "DYNAMIC_QUANTIZATION_GROUP_SIZE": "values are quantized only where the graph says so",
    "SKIP_OV_DYNAMIC_BATCHSIZE": "graphs keep their own batch dimension",
    "ENABLE_BATCH_PADDING": "graphs keep their own batch dimension",
}
OPENVINO_REFUSED = {
    "CPU_EXTENSION_PATH": "operators of other libraries are not supported in OpenVINO",
    "RESHAPE_IO_LAYERS": "a graph is served with the shapes that it was saved with",
}
OPENVINO_BACKEND_KEYS = (*OPENVINO_SETTINGS, OPENVINO_DEVICE, *OPENVINO_UNUSED, *OPENVINO_REFUSED)
_OPENVINO_DEFAULTS = ("AUTO", "NUMA", "UNDEFINED", "DYNAMIC", "NO", "")  # values that leave the choice to OpenVINO
_OPENVINO_PRECISIONS = {"YES": "bf16", "F32": "fp32", "F16": "fp16"}
_CPU_DEVICES = ("CPU", "AUTO", "AUTO:CPU", "")

# Values of oneflow-serving's `xrt` parameter.
ENGINE_FOR_XRT = {"tensorrt": "tensorrt", "openvino": "openvino", "oneflow": "onnxruntime"}
# Values of `cudnn_conv_algo_search` in the C++ backend.
_CONV_SEARCH_NUMBERS = {"0": "exhaustive", "1": "heuristic", "2": "default"}

TENSORRT_KEYS = (
    *("precision_mode", "max_workspace_size_bytes", "int8_calibration_table_name"),
    *("int8_use_native_calibration_table", "trt_engine_cache_enable", "trt_engine_cache_path"),
    *("trt_engine_cache_prefix", "trt_timing_cache_enable", "trt_timing_cache_path", "trt_force_timing_cache"),
    *("trt_dump_ep_context_model", "trt_ep_context_file_path", "trt_ep_context_embed_mode"),
    *("trt_max_partition_iterations", "trt_min_subgraph_size", "trt_dla_enable", "trt_dla_core"),
    *("trt_builder_optimization_level", "trt_profile_min_shapes", "trt_profile_opt_shapes", "trt_profile_max_shapes"),
    *("trt_cuda_graph_enable", "trt_layer_norm_fp32_fallback", "trt_context_memory_sharing_enable"),
    *("trt_auxiliary_streams", "trt_build_heuristics_enable", "trt_sparsity_enable", "trt_detailed_build_log"),
    *("trt_int8_enable", "trt_fp16_enable", "trt_bf16_enable", "trt_dump_subgraphs", "trt_tactic_sources"),
    *("trt_extra_plugin_lib_paths", "trt_weight_stripped_engine_enable", "trt_onnx_model_folder_path"),
)
OPENVINO_KEYS = ("num_of_threads", "num_streams", "device_type", "precision", "cache_dir", "enable_dynamic_shapes")
# Accelerators of GPU instances and their keys; None if ONNX Runtime itself refuses unknown keys.
GPU_ACCELERATORS: dict[str, tuple[str, ...] | None] = {"tensorrt": TENSORRT_KEYS, "cuda": None}
CPU_ACCELERATORS: dict[str, tuple[str, ...] | None] = {"openvino": OPENVINO_KEYS}
_ENGINE_FOR_ACCELERATOR = {"tensorrt": "tensorrt", "cuda": "onnxruntime", "openvino": "openvino"}
# Options of an accelerator that are settings here: accelerator -> its key -> setting.
ACCELERATOR_SETTINGS = {
    "tensorrt": {"precision_mode": "precision"},
    "openvino": {"precision": "precision", "num_of_threads": "threads", "num_streams": "streams"},
    "cuda": {"cudnn_conv_algo_search": "conv_search"},
}
ACCELERATOR_ORIGIN = "execution accelerator"  # prefix of the origin of settings from an accelerator


class Override(NamedTuple):
    """A key of `parameters`, its value, and the command-line flag that sets it."""

    key: str
    value: str
    flag: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """An engine and its required precision; None leaves the precision to the graph or the plan."""

    engine: str
    precision: Precision | None = None

    def __str__(self) -> str:
        return f"{self.engine}:{self.precision}" if self.precision else self.engine


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """Requested settings of a model. Empty values and 0 leave the choice to the plan.

    Attributes:
        engine: Name of an engine, or `auto`.
        precision: Required precision of convolutions and matrix products.
        layout: Image layout on a GPU, `nchw` or `nhwc` (not yet run on one).
        conv_search: cuDNN's search for convolution kernels (not yet run on a GPU).
        threads: Threads inside one operator.
        streams: Parts of a batch that are computed in parallel.
        self_test: Whether to replay the golden samples before the version may serve.
        fallback: Choices to try, in order, if the first one fails.
        tuning: The other session options.
        options: Engine -> options by the engine's own names.
        origins: Setting -> key or flag that set it.
        rejected: One line per value without effect, with the reason.
        op_libraries: Libraries of custom operators.
        parallel: Spread of the model over devices, or None.
        providers: Execution providers of installed wheels `onnxruntime-ep-*`, in order; the rest runs on the CPU, but
            products only if `CPU` is named last.
        seat: Who computes: Triton's C++ `onnxruntime` backend (`native`), a Python instance, or the first if it can.
    """

    engine: str = ""
    precision: Precision | None = None
    layout: str = ""
    conv_search: str = ""
    threads: int = 0
    streams: int = 0
    self_test: bool = True
    fallback: tuple[Choice, ...] = ()
    tuning: SessionTuning = field(default_factory=SessionTuning)
    options: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    origins: Mapping[str, str] = field(default_factory=dict)
    rejected: tuple[str, ...] = ()
    op_libraries: tuple[str, ...] = ()
    parallel: Parallelism | None = None
    providers: tuple[str, ...] = ()
    seat: str = SEATS[0]

    @classmethod
    def from_config(cls, config: ModelConfig, device: Device, overrides: Sequence[Override] = ()) -> Settings:
        """Read the settings of a configuration.

        Args:
            config: The configuration.
            device: Device of the instance.
            overrides: Settings of the command line, in order of precedence; they override the configuration.

        Raises:
            RepositoryError: A key is unknown, a value is malformed, or the device does not support it.
        """
        requests = _Requests()
        for key, value, flag in overrides:
            _check_known([key], KNOWN_KEYS, flag)
            requests.add_parameter(key, value, flag)
        openvino = config.backend == OPENVINO_BACKEND
        _check_known(config.parameters, (*KNOWN_KEYS, *(OPENVINO_BACKEND_KEYS if openvino else ())), "parameters")
        for key, value in sorted(config.parameters.items(), key=lambda item: item[0] not in OWN_KEYS):
            requests.add_parameter(key, value, f"parameters.{key}")
        options = _add_accelerator(requests, _accelerator(config, device, requests))
        if openvino and "engine" not in requests.values:
            requests.add("engine", "openvino", f"backend {OPENVINO_BACKEND}")
        _check_device(requests, device)
        if device.is_gpu:
            cuda = {key: requests.get(key) for key in CUDA_OPTIONS if key in requests.values}
            options["onnxruntime"] = {**options.get("onnxruntime", {}), **cuda}
        return cls(
            engine=requests.get("engine"),
            precision=requests.parse("precision", parse_precision, None),
            layout=requests.get("layout"),
            conv_search=requests.get("conv_search"),
            threads=requests.parse("threads", parse_count, 0),
            streams=requests.parse("streams", parse_count, 0),
            self_test=requests.parse("self_test", parse_switch, default=True),
            fallback=requests.parse("fallback", parse_choices, ()),
            parallel=requests.parse("parallel", parse_parallel, None),
            providers=requests.parse("providers", parse_providers, ()),
            seat=requests.parse("seat", parse_seat, SEATS[0]),
            tuning=_tuning(requests, config.graph_level),
            options={engine: given for engine, given in options.items() if given},
            origins={key: origin for key, (_, origin) in requests.values.items() if key in OWN_KEYS},
            rejected=tuple(requests.rejected),
        )


def parse_override(text: str) -> Override:
    """Read `KEY=VALUE` of a `--set` flag.

    Raises:
        RepositoryError: The `=` is missing, the key is unknown, or the command line cannot set it.
    """
    key, equals, value = text.partition("=")
    if not equals:
        raise RepositoryError(f"--set {text}: a value is missing", hint="--set KEY=VALUE")
    _check_known([key], KNOWN_KEYS, "--set")
    line = f'write into config.pbtxt: parameters {{ key: "{key}" value {{ string_value: "{value}" }} }}'
    if key == ACCEPT_IMAGES:
        raise RepositoryError(f"--set {text}: accept_images can only be set in config.pbtxt", hint=line)
    if key in TRITON_KEYS:
        raise RepositoryError(f"--set {text}: Triton reads this key from config.pbtxt", hint=line)
    if key in PUBLISHED_KEYS:
        raise RepositoryError(
            f"--set {text}: '{key}' describes a version, and setting it has no effect",
            hint="convert again with other options (graphkiln convert --task, --preprocess, --labels, --top-k)",
        )
    return Override(key, value, "--set")


def read_openvino_property(name: str, value: str, origin: str) -> tuple[tuple[str, str] | None, str]:
    """Read a parameter of Triton's `openvino` backend, or an entry of `plugin_config` of OpenVINO Model Server.

    Args:
        name: A key of OPENVINO_BACKEND_KEYS.
        value: Its value.
        origin: Where it is written, for errors.

    Returns:
        Key and value of the setting, or None and the reason why it has no effect, which is empty if it needs none.

    Raises:
        RepositoryError: It cannot be met.
    """
    word = value.upper()
    if name == OPENVINO_DEVICE:
        if word not in _CPU_DEVICES:
            raise _invalid(origin, value, "CPU, the device of OpenVINO here")
        return None, ""
    if name in OPENVINO_REFUSED and word not in _OPENVINO_DEFAULTS:
        raise RepositoryError(f"{origin} cannot be met: {OPENVINO_REFUSED[name]}", hint="remove it")
    if name not in OPENVINO_SETTINGS or word in _OPENVINO_DEFAULTS:
        return None, OPENVINO_UNUSED.get(name, "graphkiln chooses it itself")
    return (OPENVINO_SETTINGS[name], _OPENVINO_PRECISIONS.get(word, value.lower())), ""


def openvino_override(name: str, value: str, where: str) -> tuple[Override | None, str]:
    """Read an entry of `plugin_config` of OpenVINO Model Server.

    Args:
        name: Its key.
        value: Its value.
        where: Where it is written.

    Returns:
        The setting, or None and the reason why it has no effect, which is empty if it needs none.

    Raises:
        RepositoryError: It is unknown or cannot be met.
    """
    _check_known([name], OPENVINO_BACKEND_KEYS, where)
    setting, reason = read_openvino_property(name, value, where)
    return (Override(*setting, where) if setting else None), reason


class _Requests:
    """Requested keys with their values and origins. The first value of a key wins, so add by precedence.

    Attributes:
        values: Key -> value as written, and the key or flag that set it.
        rejected: One line per value without effect, with the reason.
    """

    def __init__(self) -> None:
        self.values: dict[str, tuple[str, str]] = {}
        self.rejected: list[str] = []

    def add(self, key: str, value: str, origin: str) -> None:
        """Add a value, unless an earlier source set another one."""
        held, holder = self.values.setdefault(key, (value, origin))
        if held != value:
            self.reject(key, value, origin, f"{holder} requests {held}")

    def add_parameter(self, key: str, value: str, origin: str) -> None:
        """Add a key of `parameters`, and the setting that a foreign key stands for."""
        self.add(key, value, origin)
        if key in OPENVINO_BACKEND_KEYS:
            setting, reason = read_openvino_property(key, value, origin)
            if setting:
                self.add(*setting, origin)
            elif reason:
                self.reject(key, value, origin, reason)
        if key == "xrt":
            if value not in ENGINE_FOR_XRT:
                raise _invalid(origin, value, ", ".join(ENGINE_FOR_XRT))
            self.add("engine", ENGINE_FOR_XRT[value], origin)
        if key == "intra_op_thread_count" and parse_count(origin, value):
            self.add("threads", value, origin)
        if key == "cudnn_conv_algo_search":
            self.add("conv_search", _CONV_SEARCH_NUMBERS.get(value, value.lower()), origin)

    def get(self, key: str) -> str:
        """Return the value of a key, or empty."""
        return self.values[key][0] if key in self.values else ""

    def parse(self, key: str, parser: Callable[[str, str], T], default: T) -> T:
        """Return the value of a key as read by `parser(origin, value)`, or the default."""
        if key not in self.values:
            return default
        value, origin = self.values[key]
        return parser(origin, value)

    def reject(self, key: str, value: str, origin: str, reason: str) -> None:
        self.rejected.append(f"{key} {value} of {origin}: {reason}")

    def reject_unused(self, keys: Iterable[str], reason: str) -> None:
        """Reject those of the keys that are set."""
        for key in keys:
            if key in self.values:
                self.reject(key, *self.values[key], reason)


def _check_known(keys: Iterable[str], known: Sequence[str], where: str) -> None:
    """Refuse unknown keys of a configuration block or a flag, with the nearest known one as a hint."""
    for key in keys:
        if key not in known and not _is_session_entry(key):
            offered = [each for each in known if each not in _NOT_OFFERED]
            raise RepositoryError(f"unknown key '{key}' in {where}", hint=did_you_mean(key, offered))


def _is_session_entry(key: str) -> bool:
    return key.startswith(SESSION_PREFIX) or PROVIDER_OPTION.fullmatch(key) is not None


def _accelerator(config: ModelConfig, device: Device, requests: _Requests) -> Accelerator | None:
    """Return the first execution accelerator for the instance's kind of device, or None."""
    for block, known in (("gpu", GPU_ACCELERATORS), ("cpu", CPU_ACCELERATORS)):
        where = f"{block}_execution_accelerator"
        for accelerator in config.gpu_accelerators if block == "gpu" else config.cpu_accelerators:
            _check_known([accelerator.name], tuple(known), where)
            if (keys := known[accelerator.name]) is not None:
                _check_known(accelerator.parameters, keys, f"{where} {accelerator.name}")
    if config.gpu_accelerators and not device.is_gpu:
        raise RepositoryError(
            f"gpu_execution_accelerator '{config.gpu_accelerators[0].name}' is requested, but the instance runs on "
            "the CPU",
            hint="remove the accelerator from config.pbtxt, or serve the model on a machine with a GPU",
        )
    first, *others = (config.gpu_accelerators if device.is_gpu else config.cpu_accelerators) or (None,)
    requests.rejected += [
        f"{ACCELERATOR_ORIGIN} {other.name}: only the first accelerator is used" for other in others if other
    ]
    return first


def _add_accelerator(requests: _Requests, accelerator: Accelerator | None) -> dict[str, dict[str, str]]:
    """Add the settings of an accelerator, and return its other options by engine.

    If another engine is requested, the settings have no effect; the options are kept in case its engine is a fallback.
    """
    if accelerator is None:
        return {}
    name = accelerator.name
    engine, origin = _ENGINE_FOR_ACCELERATOR[name], f"{ACCELERATOR_ORIGIN} {name}"
    requests.add("engine", engine, origin)
    options = dict(accelerator.parameters)
    for precision in (Precision.FP16, Precision.BF16):
        if name == "tensorrt" and options.pop(f"trt_{precision}_enable", "0").lower() in ("1", "true"):
            options.setdefault("precision_mode", precision)
    for key, setting in ACCELERATOR_SETTINGS[name].items():
        value = options.pop(key, "").lower()
        if value in ("", "accuracy"):  # OpenVINO's value for the saved precision
            continue
        if requests.get("engine") in (AUTO, engine):
            requests.add(setting, value, f"{origin}, {key}")
        else:
            requests.reject(setting, value, origin, "another engine is requested")
        if name == "tensorrt":
            options[key] = value  # the engine refuses it where TensorRT has no such mode
    return {engine: options}


def _check_device(requests: _Requests, device: Device) -> None:
    """Refuse settings that the device does not support, and note keys that its device or engine does not use."""
    for key, allowed in (("layout", LAYOUTS), ("conv_search", CONV_SEARCHES)):
        if key in requests.values and requests.get(key) not in allowed:
            value, origin = requests.values[key]
            raise _invalid(origin, value, ", ".join(allowed))
    if not device.is_gpu:
        requests.reject_unused(CUDA_OPTIONS, "the instance runs on the CPU")
        if "conv_search" in requests.values:
            value, origin = requests.values.pop("conv_search")
            # The C++ backend's own key has no effect on a CPU, as with that backend.
            if origin != "parameters.cudnn_conv_algo_search":
                raise RepositoryError(f"{origin} is for GPUs, but the instance runs on the CPU", hint="remove it")
            requests.reject("conv_search", value, origin, "the instance runs on the CPU, which has no cuDNN")
        if requests.get("layout") == "nhwc":
            origin = requests.values["layout"][1]
            raise RepositoryError(
                f"{origin} nhwc is for GPUs: on a CPU engines choose their own blocked layout", hint="remove it"
            )
    if "providers" not in requests.values:
        requests.reject_unused(
            [key for key in requests.values if PROVIDER_OPTION.fullmatch(key)], "providers names no plugin"
        )
    if requests.get("engine") == "openvino":
        only_onnxruntime = set(SESSION_KEYS) - {"intra_op_thread_count"}
        keys = [key for key in requests.values if key in only_onnxruntime or _is_session_entry(key)]
        requests.reject_unused(keys, "OpenVINO does not use it")


def _tuning(requests: _Requests, graph_level: int) -> SessionTuning:
    if graph_level not in GRAPH_LEVELS:
        expected = "0 (all), -1 (basic), 1 (extended) or 2 (off)"
        raise _invalid("optimization.graph.level", str(graph_level), expected)
    return SessionTuning(
        graph_level=GRAPH_LEVELS[graph_level],
        parallel=requests.parse("execution_mode", parse_flag, default=False),
        inter_threads=requests.parse("inter_op_thread_count", parse_count, 0),
        memory_arena=requests.parse("enable_mem_arena", parse_flag, default=True),
        memory_pattern=requests.parse("enable_mem_pattern", parse_flag, default=False),
        arena_shrinkage=requests.get("memory.enable_memory_arena_shrinkage"),
        config_entries={key: value for key, (value, _) in requests.values.items() if _is_session_entry(key)},
    )


# Parsers of values. `origin` is the key or flag, for errors.

_MOST_DIGITS = 20
_PRECISIONS = ", ".join(Precision)
_PARALLEL = "auto or numbers such as data=2, pipeline=2, tensor=1, micro_batches=8, memory=2GiB"
_PROVIDER = re.compile(r"[A-Za-z]\w*(:(cpu|(gpu|npu)(:\d{1,3})?))?")
_REST = "CPU"  # as the last provider: what the others leave runs on the CPU
_AUTO_NUMBERS = "auto"  # chooses the smallest `pipeline` and `tensor` that fit the memory


def _invalid(origin: str, text: str, expected: str) -> RepositoryError:
    return RepositoryError(f"{origin} must be {expected}, got '{text}'")


def parse_flag(origin: str, text: str) -> bool:
    """Read `0` or `1`, the flags of the C++ backend."""
    if text not in ("0", "1"):
        raise _invalid(origin, text, "0 or 1")
    return text == "1"


def parse_switch(origin: str, text: str) -> bool:
    """Read `on` or `off`."""
    if text not in ("on", "off"):
        raise _invalid(origin, text, "on or off")
    return text == "on"


def parse_count(origin: str, text: str) -> int:
    """Read a number of threads or streams, 0 for the default."""
    if not (text.isdecimal() and len(text) <= _MOST_DIGITS and int(text) < 1 << 31):
        raise _invalid(origin, text, "a whole number, 0 for the default")
    return int(text)


def parse_precision(origin: str, text: str) -> Precision | None:
    """Read a precision, or None from an empty text."""
    try:
        return Precision(text) if text else None
    except ValueError:
        raise _invalid(origin, text, _PRECISIONS) from None


def parse_seat(origin: str, text: str) -> str:
    """Read who computes; empty for `auto`."""
    if text and text not in SEATS:
        raise RepositoryError(f"{origin} must be {', '.join(SEATS)}, got '{text}'", hint=did_you_mean(text, SEATS))
    return text or SEATS[0]


def parse_choices(origin: str, text: str) -> tuple[Choice, ...]:
    """Read a list of engines such as `openvino:bf16, onnxruntime`."""
    choices = []
    for word in (part.strip() for part in text.split(",") if part.strip()):
        engine, _, precision = word.partition(":")
        try:
            choices.append(Choice(engine=engine, precision=Precision(precision) if precision else None))
        except ValueError:
            expected = f"ENGINE or ENGINE:PRECISION, with a precision of {_PRECISIONS}"
            raise _invalid(origin, word, expected) from None
    return tuple(choices)


def parse_providers(origin: str, text: str) -> tuple[str, ...]:
    """Read a list of execution providers such as `OpenVINO, WebGpu:gpu, CPU`."""
    names = tuple(name.strip() for name in text.split(",") if name.strip())
    others = names[:-1] if names and names[-1] == _REST else names
    if (names and not others) or not all(map(_PROVIDER.fullmatch, others)) or _REST in others:
        expected = "NAME or NAME:DEVICE, with cpu, gpu, gpu:1 or npu as the device, and CPU at most at the end"
        raise _invalid(origin, text, f"a list of {expected}")
    return names


def parse_parallel(origin: str, text: str) -> Parallelism | None:
    """Read how a model is spread: `auto`, and numbers with their names; empty for None."""
    words = [word.strip() for word in text.split(",") if word.strip()]
    if not words:
        return None
    given: dict[str, int] = {}
    for word in (word for word in words if word != _AUTO_NUMBERS):
        name, equals, value = (part.strip() for part in word.partition("="))
        number = _parse_number(name, value) if equals else None
        if number is None or name in given:
            raise _invalid(origin, text, _PARALLEL)
        given[name] = number
    auto = _AUTO_NUMBERS in words
    if auto and (given.keys() & {"pipeline", "tensor"} or words.count(_AUTO_NUMBERS) > 1):
        raise _invalid(origin, text, "either auto, which chooses `pipeline` and `tensor`, or these numbers")
    if given.get("micro_batches") and not auto and given.get("pipeline", 1) == 1:
        raise _invalid(origin, text, "with pipeline=2 or more where micro_batches is given")
    memory = given.pop("memory", 0)
    return Parallelism(auto=auto, memory_bytes=memory, **given)


def _parse_number(name: str, value: str) -> int | None:
    """Read a positive number or a size; return None if the name or the value is invalid."""
    if name == "memory":
        return read_size(value) or None
    known = name in ("data", "pipeline", "tensor", "micro_batches")
    whole = value.isdecimal() and len(value) <= _MOST_DIGITS and 0 < int(value) < 1 << 16
    return int(value) if known and whole else None
