"""What a config.pbtxt asks of the engine, as one typed object: every key is honoured or refused with a reason.

The vocabulary is that of Triton's C++ `onnxruntime` backend and of oneflow-serving, so that their repositories work
unchanged. Theirs ignore what they do not know; here an unknown key is an error that names the nearest known one.

Source: Triton ONNX Runtime backend, README ("Model Config Options"); oneflow-serving, `xrt` parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from graphkiln.engines.base import GraphLevel, SessionTuning
from graphkiln.graph.errors import RepositoryError
from graphkiln.graph.preprocess import PARAMETER as PREPROCESS
from graphkiln.graph.spelling import did_you_mean

T = TypeVar("T")

ENGINE_FOR_XRT = {"tensorrt": "tensorrt", "openvino": "openvino", "oneflow": "onnxruntime"}

_GRAPH_LEVELS: dict[int, GraphLevel] = {0: "all", -1: "basic", 1: "extended", 2: "off"}

_SESSION_KEYS = (
    "execution_mode",
    "intra_op_thread_count",
    "inter_op_thread_count",
    "enable_mem_arena",
    "enable_mem_pattern",
    "memory.enable_memory_arena_shrinkage",
)
_CUDA_KEYS = ("cudnn_conv_algo_search", "gpu_mem_limit", "arena_extend_strategy", "do_copy_in_default_stream")
_TRITON_KEYS = ("EXECUTION_ENV_PATH", "FORCE_CPU_ONLY_INPUT_TENSORS", "TRITON_SKIP_DLPACK")
"""Read by Triton's Python backend itself."""
_OTHER_KEYS = ("xrt", PREPROCESS)

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


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """What was asked for.

    Attributes:
        engine: Name of an engine, or `auto`.
        engine_from: The key that named the engine, for messages; empty for `auto`.
        threads: Threads inside one operator; 0 for the default.
        tuning: The rest of the session's options.
        cuda: Options of the CUDA provider, as written.
        accelerator: Options of the accelerator that was asked for, as written.
    """

    engine: str = "auto"
    engine_from: str = ""
    threads: int = 0
    tuning: SessionTuning = field(default_factory=SessionTuning)
    cuda: Mapping[str, str] = field(default_factory=dict)
    accelerator: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def from_config(cls, config: Mapping[str, Any], *, gpu: bool, asked: str | None = None) -> Settings:
        """Reads a model configuration.

        Args:
            config: As Triton gives it to a Python backend: the protobuf's JSON with its own field names.
            gpu: Whether the instance runs on a GPU.
            asked: Engine that the command line asks for; goes before the configuration's.

        Raises:
            RepositoryError: A key is unknown, a value is malformed, or the instance cannot do what is asked.
        """
        parameters = {name: value.get("string_value", "") for name, value in config.get("parameters", {}).items()}
        known = (*_SESSION_KEYS, *_CUDA_KEYS, *_TRITON_KEYS, *_OTHER_KEYS)
        _check_known((name for name in parameters if not name.startswith("session.")), known, "parameters")
        optimization = config.get("optimization", {})
        engine, engine_from, accelerator = _engine(parameters, optimization, gpu=gpu)
        if asked:
            # Options written for one engine mean nothing to another.
            accelerator = accelerator if asked == engine else {}
            engine, engine_from = asked, f"--enable-{asked}"
        return cls(
            engine=engine,
            engine_from=engine_from,
            threads=_read(parameters, "intra_op_thread_count", _count, 0),
            tuning=_tuning(parameters, optimization.get("graph", {})),
            cuda={name: parameters[name] for name in _CUDA_KEYS if name in parameters},
            accelerator=accelerator,
        )


def _tuning(parameters: Mapping[str, str], graph: Mapping[str, Any]) -> SessionTuning:
    level = int(graph.get("level", 0))
    if level not in _GRAPH_LEVELS:
        raise _bad("optimization.graph.level", str(level), "0 (all), -1 (basic), 1 (extended) or 2 (off)")
    return SessionTuning(
        graph_level=_GRAPH_LEVELS[level],
        parallel=_read(parameters, "execution_mode", _flag, default=False),
        inter_threads=_read(parameters, "inter_op_thread_count", _count, 0),
        memory_arena=_read(parameters, "enable_mem_arena", _flag, default=True),
        memory_pattern=_read(parameters, "enable_mem_pattern", _flag, default=True),
        arena_shrinkage=parameters.get("memory.enable_memory_arena_shrinkage", ""),
        config_entries={name: value for name, value in parameters.items() if name.startswith("session.")},
    )


def _engine(
    parameters: Mapping[str, str], optimization: Mapping[str, Any], *, gpu: bool
) -> tuple[str, str, Mapping[str, str]]:
    """The engine that is asked for, the key that asks, and its options."""
    accelerators = optimization.get("execution_accelerators", {})
    for_gpu = accelerators.get("gpu_execution_accelerator", [])
    for_cpu = accelerators.get("cpu_execution_accelerator", [])
    _check_accelerators(for_gpu, {"tensorrt": _TENSORRT_KEYS, "cuda": None}, "gpu_execution_accelerator")
    _check_accelerators(for_cpu, {"openvino": _OPENVINO_KEYS}, "cpu_execution_accelerator")
    if "xrt" in parameters:
        asked = parameters["xrt"]
        if asked not in ENGINE_FOR_XRT:
            raise _bad("parameters.xrt", asked, ", ".join(ENGINE_FOR_XRT))
        return ENGINE_FOR_XRT[asked], "parameters.xrt", {}
    if for_gpu and not gpu:
        raise RepositoryError(
            f"gpu_execution_accelerator '{for_gpu[0]['name']}' is asked for, but the instance runs on the CPU",
            hint="take the accelerator out of config.pbtxt, or serve it on a machine with a GPU",
        )
    for accelerator in for_gpu if gpu else for_cpu:
        name = accelerator["name"]
        return (
            ("onnxruntime" if name == "cuda" else name),
            f"execution accelerator {name}",
            accelerator.get("parameters", {}),
        )
    return "auto", "", {}


def _check_accelerators(
    accelerators: Iterable[Mapping[str, Any]], known: Mapping[str, tuple[str, ...] | None], where: str
) -> None:
    for accelerator in accelerators:
        _check_known([accelerator["name"]], tuple(known), where)
        keys = known[accelerator["name"]]
        if keys is not None:
            _check_known(accelerator.get("parameters", {}), keys, f"{where} {accelerator['name']}")


def _check_known(names: Iterable[str], known: tuple[str, ...], where: str) -> None:
    for name in names:
        if name not in known:
            raise RepositoryError(f"config.pbtxt: unknown key '{name}' in {where}", hint=did_you_mean(name, known))


def _read(parameters: Mapping[str, str], name: str, parse: Callable[[str, str], T], default: T) -> T:
    return parse(name, parameters[name]) if name in parameters else default


def _flag(name: str, text: str) -> bool:
    if text not in ("0", "1"):
        raise _bad(f"parameters.{name}", text, "0 or 1")
    return text == "1"


def _count(name: str, text: str) -> int:
    if not text.isdecimal():
        raise _bad(f"parameters.{name}", text, "a whole number, 0 for the default")
    return int(text)


def _bad(key: str, value: str, expected: str) -> RepositoryError:
    return RepositoryError(f"config.pbtxt: {key} must be {expected}, got '{value}'")
