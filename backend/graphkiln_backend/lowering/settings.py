"""What a model's configuration asks for, as one typed object: every key is honored or refused with a reason.

The vocabulary is graphkiln's own (`engine`, `precision`, ...), that of Triton's C++ `onnxruntime` backend and that of
oneflow-serving, so that their repositories work unchanged. Theirs ignore what they do not know; here an unknown key is
an error that names the nearest known one.

Where a setting is asked for more than once, this order decides: `--set MODEL.key=value`, `--enable-ENGINE MODEL`,
`parameters` of config.pbtxt, its `xrt` parameter, its execution accelerator. What lost is kept, with the reason.

Source: Triton ONNX Runtime backend, README ("Model Config Options"); oneflow-serving, `xrt` parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from graphkiln_backend.engines.base import GraphLevel, SessionTuning
from graphkiln_backend.graph.errors import RepositoryError
from graphkiln_backend.graph.precision import Precision
from graphkiln_backend.graph.preprocess import PARAMETER as PREPROCESS
from graphkiln_backend.graph.ranking import PARAMETER as RANKING
from graphkiln_backend.graph.spelling import did_you_mean

T = TypeVar("T")

AUTO = "auto"
Override = tuple[str, str, str]
"""A key of `parameters`, its value, and the flag that asks for it."""
ENGINE_FOR_XRT = {"tensorrt": "tensorrt", "openvino": "openvino", "oneflow": "onnxruntime"}
ENGINE_FOR_ACCELERATOR = {"tensorrt": "tensorrt", "cuda": "onnxruntime", "openvino": "openvino"}
LAYOUTS = ("nchw", "nhwc")
CONV_SEARCHES = ("exhaustive", "heuristic", "default")

_PRECISIONS = tuple(map(str, Precision))
_GRAPH_LEVELS: dict[int, GraphLevel] = {0: "all", -1: "basic", 1: "extended", 2: "off"}

_OUR_KEYS = ("engine", "precision", "layout", "conv_search", "threads", "streams", "self_test", "fallback")
_SESSION_KEYS = (
    "execution_mode",
    "intra_op_thread_count",
    "inter_op_thread_count",
    "enable_mem_arena",
    "enable_mem_pattern",
    "memory.enable_memory_arena_shrinkage",
)
_SESSION_ONLY = tuple(name for name in _SESSION_KEYS if name != "intra_op_thread_count")
_CUDA_KEYS = ("cudnn_conv_algo_search", "gpu_mem_limit", "arena_extend_strategy", "do_copy_in_default_stream")
_TRITON_KEYS = ("EXECUTION_ENV_PATH", "FORCE_CPU_ONLY_INPUT_TENSORS", "TRITON_SKIP_DLPACK")
"""Read by Triton's Python backend itself."""
_OTHER_KEYS = ("xrt", PREPROCESS, RANKING)

_CONV_SEARCH_NUMBERS = {"0": "exhaustive", "1": "heuristic", "2": "default"}
"""How the C++ backend writes `cudnn_conv_algo_search`."""

_TENSORRT_KEYS = (
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
_OPENVINO_KEYS = ("num_of_threads", "num_streams", "device_type", "precision", "cache_dir", "enable_dynamic_shapes")
_AS_SETTINGS = {
    "tensorrt": {"precision_mode": "precision"},
    "openvino": {"precision": "precision", "num_of_threads": "threads", "num_streams": "streams"},
    "cuda": {"cudnn_conv_algo_search": "conv_search"},
}
"""Options of accelerator blocks that say what a setting says: accelerator -> its key -> ours."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """An engine, and the precision that it must compute in; None leaves it to the graph or the plan."""

    engine: str
    precision: Precision | None = None

    def __str__(self) -> str:
        return f"{self.engine}:{self.precision}" if self.precision else self.engine


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """What was asked for. Empty and 0 mean that nothing was.

    Attributes:
        engine: Name of an engine, or `auto`.
        precision: Element type that convolutions and matrix products must be computed in.
        layout: `nchw` or `nhwc`: the order in which a GPU keeps images.
        conv_search: How cuDNN searches for convolution kernels.
        threads: Threads inside one operator.
        streams: Parts of a batch that are computed side by side.
        self_test: Whether the golden samples are replayed before the version may answer.
        fallback: What to try, in order, when the first choice fails.
        tuning: The rest of the session's options.
        options: Engine -> options in its own vocabulary, as written.
        origins: Setting -> the key that asked for it.
        rejected: One line per key that lost against another.
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

    @classmethod
    def from_config(cls, config: Mapping[str, Any], *, gpu: bool, overrides: Sequence[Override] = ()) -> Settings:
        """Reads a model configuration.

        Args:
            config: As Triton gives it to a Python backend: the protobuf's JSON with its own field names.
            gpu: Whether the instance runs on a GPU.
            overrides: What the command line asks for; goes before the configuration, the first before the next.

        Raises:
            RepositoryError: A key is unknown, a value is malformed, or the instance cannot do what is asked.
        """
        parameters = {name: value.get("string_value", "") for name, value in config.get("parameters", {}).items()}
        asked = _Asked()
        for name, value, flag in overrides:
            _check_known([name], _known_keys(), flag)
            _add(asked, name, value, flag)
        _check_known(parameters, _known_keys(), "parameters")
        for name, value in sorted(parameters.items(), key=lambda item: item[0] not in _OUR_KEYS):
            _add(asked, name, value, f"parameters.{name}")
        optimization = config.get("optimization", {})
        accelerator, options = _accelerator(optimization, asked, gpu=gpu)
        _add_accelerator(asked, accelerator, options)
        asked.check("layout", LAYOUTS)
        asked.check("conv_search", CONV_SEARCHES)
        if not gpu:
            _check_cpu(asked)
        if asked.get("engine") == "openvino":
            own = [name for name in asked.values if name in _SESSION_ONLY or name.startswith("session.")]
            asked.without_effect(own, "OpenVINO has no use for it")
        by_engine = {ENGINE_FOR_ACCELERATOR[accelerator]: options} if accelerator else {}
        if gpu:
            cuda = {name: asked.get(name) for name in _CUDA_KEYS[1:] if name in asked.values}
            by_engine["onnxruntime"] = {**by_engine.get("onnxruntime", {}), **cuda}
        return cls(
            engine=asked.get("engine"),
            precision=asked.read("precision", _precision, None),
            layout=asked.get("layout"),
            conv_search=asked.get("conv_search"),
            threads=asked.read("threads", _count, 0),
            streams=asked.read("streams", _count, 0),
            self_test=asked.read("self_test", _switch, default=True),
            fallback=asked.read("fallback", _choices, ()),
            tuning=_tuning(asked, optimization.get("graph", {})),
            options={name: options for name, options in by_engine.items() if options},
            origins={name: origin for name, (_, origin) in asked.values.items() if name in _OUR_KEYS},
            rejected=tuple(asked.rejected),
        )


def parse_override(text: str) -> Override:
    """Reads `KEY=VALUE` of a `--set` flag.

    Raises:
        RepositoryError: There is no `=`, or the key is unknown.
    """
    key, equals, value = text.partition("=")
    if not equals:
        raise RepositoryError(f"--set {text}: a value is missing", hint="--set KEY=VALUE")
    _check_known([key], _known_keys(), "--set")
    return key, value, "--set"


class _Asked:
    """Keys with their values and where they come from; the first to ask wins."""

    def __init__(self) -> None:
        self.values: dict[str, tuple[str, str]] = {}
        self.rejected: list[str] = []

    def add(self, name: str, value: str, origin: str) -> None:
        held, by = self.values.setdefault(name, (value, origin))
        if held != value:
            self.rejected.append(f"{name} {value} of {origin}: {by} asks for {held}")

    def get(self, name: str) -> str:
        return self.values.get(name, ("", ""))[0]

    def without_effect(self, names: Iterable[str], why: str) -> None:
        """Tells of keys that are there and change nothing."""
        for name in names:
            if name in self.values:
                value, origin = self.values[name]
                self.rejected.append(f"{name} {value} of {origin}: {why}")

    def read(self, name: str, parse: Callable[[str, str], T], default: T) -> T:
        if name not in self.values:
            return default
        value, origin = self.values[name]
        return parse(origin, value)

    def check(self, name: str, allowed: Sequence[str]) -> None:
        if name in self.values and self.get(name) not in allowed:
            value, origin = self.values[name]
            raise _bad(origin, value, ", ".join(allowed))


def _check_cpu(asked: _Asked) -> None:
    """What only a GPU has is refused on a CPU; the C++ backend's own key has no effect there, as with that backend.

    Raises:
        RepositoryError: `layout` or `conv_search` asks for something that a CPU does not have.
    """
    search, origin = asked.values.get("conv_search", ("", ""))
    asked.without_effect(_CUDA_KEYS[1:], "the instance runs on the CPU")
    if origin == "parameters.cudnn_conv_algo_search":
        asked.rejected.append(f"conv_search {search} of {origin}: the instance runs on the CPU, which has no cuDNN")
        del asked.values["conv_search"]
    elif search:
        raise RepositoryError(f"{origin} is for GPUs, but the instance runs on the CPU", hint="take it out")
    layout, origin = asked.values.get("layout", ("", ""))
    if layout == "nhwc":
        raise RepositoryError(
            f"{origin} nhwc is for GPUs: on a CPU the engines choose their own blocked layout", hint="take it out"
        )


def _add(asked: _Asked, name: str, value: str, origin: str) -> None:
    """Adds a key, and the setting of ours that it means in another vocabulary.

    Raises:
        RepositoryError: A value is unknown.
    """
    asked.add(name, value, origin)
    if name == "xrt":
        if value not in ENGINE_FOR_XRT:
            raise _bad(origin, value, ", ".join(ENGINE_FOR_XRT))
        asked.add("engine", ENGINE_FOR_XRT[value], origin)
    if name == "intra_op_thread_count" and _count(origin, value):
        asked.add("threads", value, origin)
    if name == "cudnn_conv_algo_search":
        asked.add("conv_search", _CONV_SEARCH_NUMBERS.get(value, value.lower()), origin)


def _add_accelerator(asked: _Asked, accelerator: str, options: dict[str, str]) -> None:
    """Adds what an accelerator block means; options that became settings are taken out of `options`.

    Where another engine was asked for, its options stay for the case that it is a fallback; its settings do not count.
    """
    if not accelerator:
        return
    origin = f"execution accelerator {accelerator}"
    asked.add("engine", ENGINE_FOR_ACCELERATOR[accelerator], origin)
    asked_for = asked.get("engine") in (AUTO, ENGINE_FOR_ACCELERATOR[accelerator])
    for precision in (Precision.FP16, Precision.BF16):
        if accelerator == "tensorrt" and options.pop(f"trt_{precision}_enable", "0").lower() in ("1", "true"):
            options.setdefault("precision_mode", precision)
    for key, name in _AS_SETTINGS[accelerator].items():
        value = options.pop(key, "").lower()
        if value in ("", "accuracy"):  # OpenVINO's word for: as saved
            continue
        if asked_for:
            asked.add(name, value, f"{origin}, {key}")
        else:
            asked.rejected.append(f"{name} {value} of {origin}: another engine is asked for")


def _tuning(asked: _Asked, graph: Mapping[str, Any]) -> SessionTuning:
    level = int(graph.get("level", 0))
    if level not in _GRAPH_LEVELS:
        raise _bad("optimization.graph.level", str(level), "0 (all), -1 (basic), 1 (extended) or 2 (off)")
    return SessionTuning(
        graph_level=_GRAPH_LEVELS[level],
        parallel=asked.read("execution_mode", _flag, default=False),
        inter_threads=asked.read("inter_op_thread_count", _count, 0),
        memory_arena=asked.read("enable_mem_arena", _flag, default=True),
        memory_pattern=asked.read("enable_mem_pattern", _flag, default=True),
        arena_shrinkage=asked.get("memory.enable_memory_arena_shrinkage"),
        config_entries={name: value for name, (value, _) in asked.values.items() if name.startswith("session.")},
    )


def _accelerator(optimization: Mapping[str, Any], asked: _Asked, *, gpu: bool) -> tuple[str, dict[str, str]]:
    """The execution accelerator that is asked for and its options; two empty ones where there is none."""
    accelerators = optimization.get("execution_accelerators", {})
    for_gpu = accelerators.get("gpu_execution_accelerator", [])
    for_cpu = accelerators.get("cpu_execution_accelerator", [])
    _check_accelerators(for_gpu, {"tensorrt": _TENSORRT_KEYS, "cuda": None}, "gpu_execution_accelerator")
    _check_accelerators(for_cpu, {"openvino": _OPENVINO_KEYS}, "cpu_execution_accelerator")
    if for_gpu and not gpu:
        raise RepositoryError(
            f"gpu_execution_accelerator '{for_gpu[0]['name']}' is asked for, but the instance runs on the CPU",
            hint="take the accelerator out of config.pbtxt, or serve it on a machine with a GPU",
        )
    blocks = for_gpu if gpu else for_cpu
    asked.rejected += [f"execution accelerator {other['name']}: one stands before it" for other in blocks[1:]]
    return (str(blocks[0]["name"]), dict(blocks[0].get("parameters", {}))) if blocks else ("", {})


def _check_accelerators(
    accelerators: Iterable[Mapping[str, Any]], known: Mapping[str, tuple[str, ...] | None], where: str
) -> None:
    for accelerator in accelerators:
        _check_known([accelerator["name"]], tuple(known), where)
        keys = known[accelerator["name"]]
        if keys is not None:
            _check_known(accelerator.get("parameters", {}), keys, f"{where} {accelerator['name']}")


def _known_keys() -> tuple[str, ...]:
    return (*_OUR_KEYS, *_SESSION_KEYS, *_CUDA_KEYS, *_TRITON_KEYS, *_OTHER_KEYS)


def _check_known(names: Iterable[str], known: Sequence[str], where: str) -> None:
    for name in names:
        if name not in known and not name.startswith("session."):
            raise RepositoryError(f"unknown key '{name}' in {where}", hint=did_you_mean(name, known))


def _flag(origin: str, text: str) -> bool:
    if text not in ("0", "1"):
        raise _bad(origin, text, "0 or 1")
    return text == "1"


def _switch(origin: str, text: str) -> bool:
    if text not in ("on", "off"):
        raise _bad(origin, text, "on or off")
    return text == "on"


def _count(origin: str, text: str) -> int:
    if not text.isdecimal():
        raise _bad(origin, text, "a whole number, 0 for the default")
    return int(text)


def _precision(origin: str, text: str) -> Precision | None:
    if not text:
        return None
    if text not in _PRECISIONS:
        raise _bad(origin, text, ", ".join(_PRECISIONS))
    return Precision(text)


def _choices(origin: str, text: str) -> tuple[Choice, ...]:
    """Reads `openvino:bf16, onnxruntime`."""
    choices = []
    for word in filter(None, (part.strip() for part in text.split(","))):
        engine, _, precision = word.partition(":")
        if precision and precision not in _PRECISIONS:
            raise _bad(origin, word, f"ENGINE or ENGINE:PRECISION, with a precision of {', '.join(_PRECISIONS)}")
        choices.append(Choice(engine=engine, precision=Precision(precision) if precision else None))
    return tuple(choices)


def _bad(origin: str, value: str, expected: str) -> RepositoryError:
    return RepositoryError(f"{origin} must be {expected}, got '{value}'")
