"""Execution providers: which one a configuration asks for, with which options, and whether it can run here.

The CUDA provider is not yet run on a GPU: built from the documentation and tested without one; `scripts/gpu-check` is
the first run.
"""

from __future__ import annotations

import onnxruntime

from graphkiln_backend.engines.base import SessionConfig, Support
from graphkiln_backend.engines.hardware import gpu
from graphkiln_backend.graph.device import Device
from graphkiln_backend.graph.errors import EngineUnavailable
from graphkiln_backend.graph.precision import Precision

CPU, CUDA = "CPUExecutionProvider", "CUDAExecutionProvider"

Provider = tuple[str, dict[str, str]]  # an execution provider's name and its options


def probe_gpu(provider: str, device: Device) -> Support:
    """Whether this build of ONNX Runtime has a provider, and the machine the GPU."""
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
    """The CPU's or CUDA's provider for a configuration; the user's own options come last.

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
