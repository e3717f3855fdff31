"""Runs whose tensors stay on the device: what one session leaves there, the next one reads there.

Not yet run on a GPU: built from the documentation and tested on the CPU, where bindings are the same.

Source: ONNX Runtime, "I/O Binding"; DLPack, "Python Specification for DLPack".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import onnxruntime

from graphkiln_backend.engines.base import DeviceTensor
from graphkiln_backend.engines.onnxruntime.providers import CUDA, Provider
from graphkiln_backend.graph.dtypes import AnyArray, DType
from graphkiln_backend.graph.signature import Signature

_CARRIED = "__dlpack__"
"""What a tensor needs so that other libraries can use it where it is."""


def why_not_on_device(signature: Signature) -> str:
    """Why a session cannot leave its tensors on the device; empty where it can.

    Args:
        signature: Of the session.
    """
    if not hasattr(onnxruntime.OrtValue, _CARRIED):
        return f"ONNX Runtime {onnxruntime.__version__} hands no tensors to other libraries (DLPack); 1.32 does"
    bound = [spec for spec in (*signature.inputs, *signature.outputs) if spec.dtype in (DType.BYTES, DType.BF16)]
    return f"'{bound[0].name}' is {bound[0].dtype}, which cannot be bound" if bound else ""


def run_bound(
    session: onnxruntime.InferenceSession,
    provider: Provider,
    feeds: Mapping[str, AnyArray | DeviceTensor],
    outputs: Sequence[str],
    options: onnxruntime.RunOptions,
) -> dict[str, DeviceTensor]:
    """Computes outputs, and leaves them where the provider computes.

    Args:
        session: The session.
        provider: That it was built for.
        feeds: Arrays, which are copied to the device, and tensors that are on it.
        outputs: Names.
        options: Of the run, at whose end the device is done.
    """
    kind, facts = provider
    device = ("cuda", int(facts["device_id"])) if kind == CUDA else ("cpu", 0)
    binding = session.io_binding()
    for name, tensor in feeds.items():
        if isinstance(tensor, np.ndarray):
            binding.bind_cpu_input(name, np.ascontiguousarray(tensor))
        else:
            binding.bind_ortvalue_input(name, _adopt(tensor))
    for name in outputs:
        binding.bind_output(name, *device)
    session.run_with_iobinding(binding, options)
    return dict(zip(outputs, binding.get_outputs(), strict=True))


def _adopt(tensor: DeviceTensor) -> onnxruntime.OrtValue:
    """A tensor of any library as one of ONNX Runtime: nothing is copied."""
    return tensor if isinstance(tensor, onnxruntime.OrtValue) else onnxruntime.OrtValue.from_dlpack(tensor)
