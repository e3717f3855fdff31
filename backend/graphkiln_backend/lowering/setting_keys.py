"""The keys of a model's configuration: graphkiln's own, and those of the backends that it stands in for.

graphkiln's are `engine`, `precision`, ...; the others are those of Triton's C++ `onnxruntime` backend and of
oneflow-serving, so that their repositories work unchanged. Theirs ignore what they do not know; here an unknown key is
an error that names the nearest known one.

Source: Triton ONNX Runtime backend, README ("Model Config Options"); oneflow-serving, `xrt` parameter.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from graphkiln_backend.engines.base import GraphLevel
from graphkiln_backend.graph.contract import GRAPHS
from graphkiln_backend.graph.contract import PARAMETER as CONTRACTS
from graphkiln_backend.graph.errors import RepositoryError
from graphkiln_backend.graph.preprocess import ACCEPT_IMAGES
from graphkiln_backend.graph.preprocess import PARAMETER as PREPROCESS
from graphkiln_backend.graph.preprocess import PUBLISHED as IMAGE_MODEL
from graphkiln_backend.graph.task import PARAMETER as TASK
from graphkiln_backend.graph.task import RANKING
from graphkiln_backend.graph.text import did_you_mean
from graphkiln_backend.repository.batch_tensors import TEXT_ID_PARAMETER

LAYOUTS = ("nchw", "nhwc")
CONV_SEARCHES = ("exhaustive", "heuristic", "default")
GRAPH_LEVELS: dict[int, GraphLevel] = {0: "all", -1: "basic", 1: "extended", 2: "off"}
"""`optimization.graph.level` -> how far ONNX Runtime rewrites the graph."""

OWN_KEYS = ("engine", "precision", "layout", "conv_search", "threads", "streams", "self_test", "fallback", "parallel")
SESSION_KEYS = (
    "execution_mode",
    "intra_op_thread_count",
    "inter_op_thread_count",
    "enable_mem_arena",
    "enable_mem_pattern",
    "memory.enable_memory_arena_shrinkage",
)
SESSION_PREFIX = "session."
"""Begins the keys of ONNX Runtime's own session entries, which are handed on as they are."""
CUDA_KEYS = ("cudnn_conv_algo_search", "gpu_mem_limit", "arena_extend_strategy", "do_copy_in_default_stream")
CUDA_OPTIONS = CUDA_KEYS[1:]
"""Handed to the CUDA provider as they are; the first of the keys is a setting of ours, `conv_search`."""
TRITON_KEYS = ("EXECUTION_ENV_PATH", "FORCE_CPU_ONLY_INPUT_TENSORS", "TRITON_SKIP_DLPACK")
"""Read by Triton's Python backend itself."""
UNREAD_KEYS = ("execute_delay_ms",)
"""Of the custom backend that Triton's example `simple_dyna_sequence` once had; no backend of ONNX graphs reads it."""
PUBLISHED_KEYS = (CONTRACTS, GRAPHS, PREPROCESS, RANKING, TASK, TEXT_ID_PARAMETER, ACCEPT_IMAGES, IMAGE_MODEL)
_NOT_OFFERED = frozenset((*TRITON_KEYS, *UNREAD_KEYS, *PUBLISHED_KEYS))
"""What changes nothing where a person writes it."""
KNOWN_KEYS = (*OWN_KEYS, *SESSION_KEYS, *CUDA_KEYS, *TRITON_KEYS, *UNREAD_KEYS, "xrt", *PUBLISHED_KEYS)
"""All keys of `parameters`, beside those with `SESSION_PREFIX`."""

ENGINE_FOR_XRT = {"tensorrt": "tensorrt", "openvino": "openvino", "oneflow": "onnxruntime"}
"""Values of oneflow-serving's `xrt` parameter."""
CONV_SEARCH_NUMBERS = {"0": "exhaustive", "1": "heuristic", "2": "default"}
"""How the C++ backend writes `cudnn_conv_algo_search`."""

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
GPU_ACCELERATORS: dict[str, tuple[str, ...] | None] = {"tensorrt": TENSORRT_KEYS, "cuda": None}
"""Accelerators of GPU instances and their keys; None where ONNX Runtime itself refuses what it does not know."""
CPU_ACCELERATORS: dict[str, tuple[str, ...] | None] = {"openvino": OPENVINO_KEYS}
ACCELERATOR_ORIGIN = "execution accelerator"
"""Begins what is said of where a setting comes from that an accelerator means."""
ENGINE_FOR_ACCELERATOR = {"tensorrt": "tensorrt", "cuda": "onnxruntime", "openvino": "openvino"}
ACCELERATOR_SETTINGS = {
    "tensorrt": {"precision_mode": "precision"},
    "openvino": {"precision": "precision", "num_of_threads": "threads", "num_streams": "streams"},
    "cuda": {"cudnn_conv_algo_search": "conv_search"},
}
"""Options of an accelerator that mean a setting: accelerator -> its key -> ours."""


def check_known(keys: Iterable[str], known: Sequence[str], where: str) -> None:
    """Refuses keys that nobody reads.

    Args:
        keys: As written.
        known: Those that are read.
        where: The block of the configuration or the flag that holds them, for the message.

    Raises:
        RepositoryError: A key is unknown; the hint is the nearest known one.
    """
    for key in keys:
        if key not in known and not key.startswith(SESSION_PREFIX):
            offered = [each for each in known if each not in _NOT_OFFERED]
            raise RepositoryError(f"unknown key '{key}' in {where}", hint=did_you_mean(key, offered))
