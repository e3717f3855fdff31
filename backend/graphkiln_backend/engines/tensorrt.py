"""TensorRT through ONNX Runtime's TensorRT provider; the types in the graph decide the precision.

TensorRT 10 and 11 both have strongly typed networks: fp16, bf16 and int8 are expressed in the graph (casts, Q/DQ), not
by flags. Engines are built for shapes: the optimization profile is derived from the signature, so that no admitted
request makes TensorRT build another engine. A dynamic dimension other than the batch has no bounds in a signature;
without a profile from the user it is refused.

Which TensorRT is used is up to ONNX Runtime's provider, which is linked against one major version: its name is read
from the provider. Builder flags of weak typing exist up to TensorRT 10; from 11 on they are neither set nor accepted.

Not yet run on a GPU: built from the documentation and tested without one; `scripts/gpu-check` is the first run.

Source: ONNX Runtime, "TensorRT Execution Provider" (configuration options, explicit shape range); TensorRT, "Migrating
from TensorRT 10.x to 11.x" (strong typing, removed interfaces, `IEngineInspector`).
"""

from __future__ import annotations

import ctypes
import functools
import json
import re
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import onnxruntime

from graphkiln_backend.engines.base import KernelType, SessionConfig, Support
from graphkiln_backend.engines.onnxruntime.loading import probe_gpu, select_provider, session_options
from graphkiln_backend.engines.onnxruntime.session import OnnxRuntimeSession
from graphkiln_backend.graph.device import Device
from graphkiln_backend.graph.errors import LoweringError
from graphkiln_backend.graph.modules import installed_version
from graphkiln_backend.graph.precision import Precision
from graphkiln_backend.graph.signature import Signature, TensorSpec, readable_dim
from graphkiln_backend.repository.onnx_file import count_products, read_precision, read_signature

PROVIDER = "TensorrtExecutionProvider"

_PROVIDER_LIBRARY = Path(onnxruntime.__file__).parent / "capi" / "libonnxruntime_providers_tensorrt.so"
_LIBRARY = re.compile(rb"libnvinfer\.so\.(\d+)")
_STRONGLY_TYPED = 11  # the first major version without builder flags for types
# Options that TensorRT 11 has no interface for -> how the same is done there. Source: "Migrating from TensorRT 10.x to
# 11.x"; `trt_layer_norm_fp32_fallback` of ONNX Runtime sets the types of layers.
_IN_THE_GRAPH = "set precision: {}, which puts the types into the graph"
_SCALES = "convert with --precision int8 --calibration SAMPLES, which puts the scales into the graph"
_REMOVED = {
    "precision_mode": _IN_THE_GRAPH.format("fp16 or bf16"),
    "trt_fp16_enable": _IN_THE_GRAPH.format("fp16"),
    "trt_bf16_enable": _IN_THE_GRAPH.format("bf16"),
    "trt_int8_enable": _SCALES,
    "trt_int8_calibration_table_name": _SCALES,
    "trt_int8_use_native_calibration_table": _SCALES,
    "trt_layer_norm_fp32_fallback": "leave it out: lowered graphs keep normalizations in FP32",
    "trt_dla_enable": "leave it out, or stay with TensorRT 10: DLA is not supported up to TensorRT 11.4",
    "trt_dla_core": "leave it out, or stay with TensorRT 10: DLA is not supported up to TensorRT 11.4",
}
_OFF = frozenset(("", "0", "false", "no", "fp32"))
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
            _load_library()
        except OSError as error:
            major, installed = _major(), installed_version("tensorrt")
            found = f"; tensorrt {installed} is installed" if installed else ""
            return Support(
                ok=False,
                reason=f"tensorrt on {device}: {error}, which ONNX Runtime {onnxruntime.__version__} is linked "
                f"against{found} (pip install 'tensorrt>={major},<{major + 1}', or NVIDIA's image)",
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
        session = OnnxRuntimeSession(
            graph_path, session_options(config), [(PROVIDER, options), cuda], fused_products=fused_products
        )
        if compiled:
            read, reason = _read_engines(compiled)
            if read:
                session.fused_products = read
            else:
                session.notes = (*session.notes, f"types of products are those of the graph: {reason}")
        return session


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
    options = {"device_id": str(config.device.index)}
    if _major() >= _STRONGLY_TYPED:
        own = _without_removed(own)
    else:
        own.pop("precision_mode", None)  # the setting `precision`
        options |= {"trt_fp16_enable": "0", "trt_int8_enable": "0"}
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


def _without_removed(options: Mapping[str, str]) -> dict[str, str]:
    """Return the options without those that TensorRT 11 has no interface for.

    Raises:
        LoweringError: One of them is switched on.
    """
    for name, hint in _REMOVED.items():
        if options.get(name, "").lower() not in _OFF:
            raise LoweringError(
                f"{name} needs TensorRT 10 or older",
                attempts=(
                    f"ONNX Runtime {onnxruntime.__version__} uses TensorRT {_major()}, whose types are the graph's",
                ),
                hint=hint,
            )
    return {name: value for name, value in options.items() if name not in _REMOVED}


@functools.cache
def _library() -> str:
    """Return the name of TensorRT's library that ONNX Runtime's provider is linked against, or empty without one."""
    found = _LIBRARY.search(_PROVIDER_LIBRARY.read_bytes()) if _PROVIDER_LIBRARY.is_file() else None
    return found[0].decode() if found else ""


def _major() -> int:
    """Return the major version of TensorRT that the provider needs; 0 if ONNX Runtime has no such provider."""
    return int(_library().rpartition(".")[2] or 0)


def _load_library() -> ctypes.CDLL:
    """Load TensorRT's library; the wheel `tensorrt` keeps it in a separate folder, and loads it when it is imported.

    Raises:
        OSError: It is not installed.
    """
    name = _library()
    if not name:
        raise OSError(f"{_PROVIDER_LIBRARY} names no TensorRT library")
    try:
        return ctypes.CDLL(name)
    except OSError:
        with suppress(ImportError, OSError):
            import_module("tensorrt")
        return ctypes.CDLL(name)


def _version() -> str:
    """Return the version number of the TensorRT library, such as 101300."""
    try:
        library = _load_library()
    except OSError:
        return "not installed"
    return str(library.getInferLibVersion())


# Types of an engine, by TensorRT's inspector.
#
# Not yet run: written from the documentation, and tested with output written by hand.

# Types in the inspector's words: `Row major linear FP16 format` in TensorRT 10, `Half` in 11; the narrowest first.
_ENGINE_TYPES: tuple[tuple[re.Pattern[str], KernelType], ...] = (
    (re.compile(r"\bu?int8\b", re.IGNORECASE), Precision.INT8),
    (re.compile(r"\b(bf16|bfloat16)\b", re.IGNORECASE), Precision.BF16),
    (re.compile(r"\b(fp16|half)\b", re.IGNORECASE), Precision.FP16),
    (re.compile(r"\b(fp32|float)\b", re.IGNORECASE), Precision.FP32),
)
_PRODUCTS = re.compile(r"conv|gemm|matrixmultiply", re.IGNORECASE)  # in the type of a layer or of its parameters


def read_products(information: str) -> Counter[KernelType]:
    """Count the convolutions and matrix products of an engine by the narrowest type of their inputs.

    Args:
        information: JSON of `IEngineInspector.getEngineInformation`, of TensorRT 10 or 11.

    Returns:
        Type -> number of layers; empty for an engine whose layers have names only.
    """
    found: Counter[KernelType] = Counter()
    for layer in json.loads(information).get("Layers", ()):
        if isinstance(layer, dict) and _PRODUCTS.search(f"{layer.get('LayerType')} {layer.get('ParameterType')}"):
            types = " ".join(_type_of(tensor) for tensor in layer.get("Inputs", ()))
            found[next((kernel_type for word, kernel_type in _ENGINE_TYPES if word.search(types)), "unknown")] += 1
    return found


def _type_of(tensor: Mapping[str, Any]) -> str:
    """Return the type of a tensor: TensorRT 10 reports it together with the layout, 11 in a separate field."""
    return str(tensor.get("Datatype") or tensor.get("Format/Datatype") or "")


def _read_engines(folder: Path) -> tuple[Counter[KernelType], str]:
    """Return the products of the engines in a folder by type, or the reason why they are unknown."""
    engines = sorted(folder.glob("*.engine"))
    if not engines:
        return Counter(), "the provider kept no engine"
    try:
        tensorrt: Any = import_module("tensorrt")
    except (ImportError, OSError) as error:
        return Counter(), f"TensorRT's inspector cannot be used: {error}"
    runtime = tensorrt.Runtime(tensorrt.Logger(tensorrt.Logger.ERROR))
    found: Counter[KernelType] = Counter()
    for path in engines:
        engine = runtime.deserialize_cuda_engine(path.read_bytes())
        if engine is None:
            return Counter(), f"TensorRT {tensorrt.__version__} cannot read {path.name}"
        inspector = engine.create_engine_inspector()
        found += read_products(inspector.get_engine_information(tensorrt.LayerInformationFormat.JSON))
    return found, "the engine keeps names of layers only"
