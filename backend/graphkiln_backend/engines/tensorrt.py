"""TensorRT through ONNX Runtime's TensorRT provider; the types in the graph decide the precision.

TensorRT 10 and 11 both have strongly typed networks: fp16, bf16 and int8 are expressed in the graph (casts, Q/DQ), not
by flags. Engines are built for shapes: the optimization profile is derived from the signature, so that no admitted
request makes TensorRT build another engine. A dynamic dimension other than the batch has no bounds in a signature;
without a profile from the user it is refused.

Not yet run on a GPU: built from the documentation and tested without one; `scripts/gpu-check` is the first run.

Source: ONNX Runtime, "TensorRT Execution Provider" (configuration options, explicit shape range).
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import onnxruntime

from graphkiln_backend.engines.base import KernelType, SessionConfig, Support
from graphkiln_backend.engines.onnxruntime.loading import probe_gpu, select_provider, session_options
from graphkiln_backend.engines.onnxruntime.session import OnnxRuntimeSession
from graphkiln_backend.graph.device import Device
from graphkiln_backend.graph.errors import LoweringError
from graphkiln_backend.graph.signature import Signature, TensorSpec, readable_dim
from graphkiln_backend.repository.onnx_file import count_products, read_precision, read_signature

PROVIDER = "TensorrtExecutionProvider"

_LIBRARY = "libnvinfer.so.10"  # ONNX Runtime's provider is linked against TensorRT 10
# Options of Triton's accelerator block -> names of the provider, where they differ.
_RENAMED = {
    "max_workspace_size_bytes": "trt_max_workspace_size",
    "int8_calibration_table_name": "trt_int8_calibration_table_name",
    "int8_use_native_calibration_table": "trt_int8_use_native_calibration_table",
}
_PROFILES = ("trt_profile_min_shapes", "trt_profile_opt_shapes", "trt_profile_max_shapes")


class TensorRtEngine:
    """TensorRT on an NVIDIA GPU."""

    def probe(self, device: Device) -> Support:
        """Support the GPUs of this machine if the provider and TensorRT's libraries are installed."""
        if not device.is_gpu:
            return Support(ok=False, reason="tensorrt serves gpu:N, not cpu")
        support = probe_gpu(PROVIDER, device)
        if not support.ok:
            return support
        try:
            ctypes.CDLL(_LIBRARY)
        except OSError as error:
            return Support(
                ok=False, reason=f"tensorrt on {device}: {error} (pip install 'tensorrt>=10,<11', or NVIDIA's image)"
            )
        return support

    def identity(self, config: SessionConfig) -> Mapping[str, str]:
        """See `engines.base.Engine.identity`."""
        return {
            "onnxruntime": onnxruntime.__version__,
            "tensorrt": _version(),
            "options": str(sorted(_options(config, None, None).items())),
            "largest batch": str(config.largest_batch),
        }

    def compile(self, graph_path: Path, config: SessionConfig, folder: Path) -> None:
        """Let TensorRT write its engines and timings for the profile.

        Raises:
            LoweringError: The graph cannot be built, or has sizes without bounds.
        """
        self.build(graph_path, config, folder).close()

    def build(self, graph_path: Path, config: SessionConfig, compiled: Path | None = None) -> OnnxRuntimeSession:
        """Load a graph; nodes that TensorRT does not support run on CUDA, and are counted.

        Raises:
            LoweringError: TensorRT refuses the graph, or it has sizes without bounds.
        """
        precision = config.precision or read_precision(graph_path)
        options = _options(replace(config, precision=precision), read_signature(graph_path), compiled)
        cuda = select_provider(replace(config, options={}))
        # ONNX Runtime's profile shows a single kernel for all nodes in TensorRT. Its network is strongly typed, so the
        # products are computed in the graph's precision.
        fused_products: dict[KernelType, int] = {precision: count_products(graph_path)}
        return OnnxRuntimeSession(
            graph_path, session_options(config), [(PROVIDER, options), cuda], fused_products=fused_products
        )


def _options(config: SessionConfig, signature: Signature | None, folder: Path | None) -> dict[str, str]:
    """Return the provider's options for a configuration; the user's options override them.

    Args:
        config: The configuration.
        signature: Signature for the optimization profile, or None for no profile.
        folder: Folder for engines and timings, or None.

    Raises:
        LoweringError: An input has a size without bounds.
    """
    if config.options.get("trt_cuda_graph_enable", "0") not in ("0", "false", "False"):
        raise LoweringError(
            "trt_cuda_graph_enable is not supported",
            attempts=("CUDA graphs need inputs and outputs at fixed addresses, and Triton's are not",),
            hint="leave it out; engine onnxruntime has enable_cuda_graph in its cuda block",
        )
    own = {_RENAMED.get(name, name): value for name, value in config.options.items()}
    options = {"device_id": str(config.device.index), "trt_fp16_enable": "0", "trt_int8_enable": "0"}
    if config.precision and (config.precision.is_half or config.precision.is_integer):
        # The provider disables a type unless it is enabled here; the graph determines where it is used.
        options[f"trt_{config.precision}_enable"] = "1"
    if folder:
        options |= {"trt_engine_cache_enable": "1", "trt_engine_cache_path": str(folder)}
        options |= {"trt_timing_cache_enable": "1", "trt_timing_cache_path": str(folder)}
    if signature and not any(name in own for name in _PROFILES):
        options |= _profile_shapes(signature, config.largest_batch)
    return {**options, **own}


def _profile_shapes(signature: Signature, largest_batch: int) -> dict[str, str]:
    """Return the profile's shapes: batches of 1 to the largest, optimized for the largest."""
    dynamic = [spec for spec in signature.inputs if any(isinstance(dim, str) for dim in spec.shape)]
    if not dynamic:
        return {}
    sizes = (1, largest_batch, largest_batch)
    return {name: _shapes(dynamic, size) for name, size in zip(_PROFILES, sizes, strict=True)}


def _shapes(specs: list[TensorSpec], batch: int) -> str:
    return ",".join(f"{spec.name}:{'x'.join(map(str, _shape(spec, batch)))}" for spec in specs)


def _shape(spec: TensorSpec, batch: int) -> list[int]:
    free = [readable_dim(dim) for dim in spec.shape[1:] if isinstance(dim, str)]
    if free:
        raise LoweringError(
            f"TensorRT needs bounds for every size, and input {spec} has none for {', '.join(free)}",
            attempts=("TensorRT would build an engine during a request for each new size",),
            hint=f"give {', '.join(_PROFILES)} in the tensorrt block of config.pbtxt, or convert with fixed sizes",
        )
    return [batch if isinstance(dim, str) else dim for dim in spec.shape]


def _version() -> str:
    """Return the version number of the TensorRT library, such as 101300."""
    try:
        library = ctypes.CDLL(_LIBRARY)
    except OSError:
        return "not installed"
    return str(library.getInferLibVersion())
