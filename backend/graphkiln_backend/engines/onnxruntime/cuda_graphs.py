"""Runs of an ONNX Runtime session through CUDA graphs: one capture for each set of input shapes.

A captured graph replays its kernels at the addresses of the first run, so inputs and outputs live in buffers that never
move.

ONNX Runtime keeps a captured graph with the thread that captured it, and allows no other thread to use it: runs of
other threads are plain (`engines.base.PLAIN_RUNS`).

Not yet run on a GPU: built from the documentation and tested without one; `scripts/gpu-check` is the first run.

Source: ONNX Runtime, "CUDA Execution Provider" (`enable_cuda_graph`, run option `gpu_graph_id`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnxruntime

from graphkiln_backend.engines.base import PLAIN_RUNS
from graphkiln_backend.graph.dtypes import AnyArray

_MAX_CAPTURES = 64
"""Each holds its buffers on the device. Further shapes run without a capture."""
NO_CAPTURE = "-1"
"""Value of `gpu_graph_id` for a run that neither captures nor replays."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Capture:
    binding: onnxruntime.IOBinding
    inputs: Mapping[str, onnxruntime.OrtValue]
    outputs: Mapping[str, onnxruntime.OrtValue]
    options: onnxruntime.RunOptions


class CudaGraphRunner:
    """Runs a session on fixed buffers. Not thread-safe, as a session is not.

    Args:
        session: Made with `enable_cuda_graph`.
        device: Where the buffers live: `cuda`, or `cpu` for tests.
        device_id: Number of the GPU.
    """

    def __init__(self, session: onnxruntime.InferenceSession, device: str = "cuda", device_id: int = 0) -> None:
        self._session = session
        self._device = device
        self._device_id = device_id
        self._captures: dict[tuple[object, ...], _Capture] = {}

    def run(self, feeds: Mapping[str, AnyArray], outputs: Sequence[str]) -> dict[str, AnyArray]:
        """Computes outputs; see `engines.base.Session.run`."""
        if PLAIN_RUNS.get():
            return self._run_plain(feeds, outputs)
        key = (*outputs, *((name, array.shape) for name, array in sorted(feeds.items())))
        capture = self._captures.get(key)
        if capture is None:
            results = self._run_plain(feeds, outputs)
            if len(self._captures) < _MAX_CAPTURES:
                self._captures[key] = self._bind(feeds, results)
            return results
        for name, array in feeds.items():
            capture.inputs[name].update_inplace(np.ascontiguousarray(array))
        self._session.run_with_iobinding(capture.binding, capture.options)
        return {name: np.array(value.numpy()) for name, value in capture.outputs.items()}

    def _run_plain(self, feeds: Mapping[str, AnyArray], outputs: Sequence[str]) -> dict[str, AnyArray]:
        arrays = self._session.run(list(outputs), dict(feeds), _options(NO_CAPTURE))
        return dict(zip(outputs, arrays, strict=True))

    def _bind(self, feeds: Mapping[str, AnyArray], results: Mapping[str, AnyArray]) -> _Capture:
        """Buffers for these shapes; the first run on them is the one that CUDA captures."""
        device = (self._device, self._device_id)
        inputs = {
            # A copy: on the CPU the value would be the caller's array, which later runs then overwrite.
            name: onnxruntime.OrtValue.ortvalue_from_numpy(np.array(array, order="C"), *device)
            for name, array in feeds.items()
        }
        outputs = {
            name: onnxruntime.OrtValue.ortvalue_from_shape_and_type(array.shape, array.dtype.type, *device)
            for name, array in results.items()
        }
        binding = self._session.io_binding()
        for name, value in inputs.items():
            binding.bind_ortvalue_input(name, value)
        for name, value in outputs.items():
            binding.bind_ortvalue_output(name, value)
        options = _options(str(len(self._captures) + 1))
        return _Capture(binding=binding, inputs=inputs, outputs=outputs, options=options)


def _options(graph_id: str) -> onnxruntime.RunOptions:
    options = onnxruntime.RunOptions()
    options.add_run_config_entry("gpu_graph_id", graph_id)
    return options
