"""Runs of an ONNX Runtime session through CUDA graphs: one recording for each set of input shapes.

A recording replays kernels at the addresses of the first run, so inputs and outputs live in buffers that never move.

Source: ONNX Runtime, "CUDA Execution Provider" (`enable_cuda_graph`, run option `gpu_graph_id`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnxruntime

from graphkiln_backend.graph.dtypes import AnyArray

_MOST_RECORDINGS = 64
"""Each holds its buffers on the device. Further shapes run without a recording."""
NOT_RECORDED = "-1"
"""Value of `gpu_graph_id` for a run that neither records nor replays."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Recording:
    binding: Any
    inputs: Mapping[str, onnxruntime.OrtValue]
    outputs: Mapping[str, onnxruntime.OrtValue]
    options: onnxruntime.RunOptions


class CapturedRuns:
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
        self._recordings: dict[tuple[object, ...], _Recording] = {}

    def run(self, feeds: Mapping[str, AnyArray], names: Sequence[str]) -> dict[str, AnyArray]:
        """Computes outputs; see `engines.base.Session.run`."""
        key = (*names, *((name, array.shape) for name, array in sorted(feeds.items())))
        recording = self._recordings.get(key)
        if recording is None:
            outputs = self._session.run(list(names), dict(feeds), _options(NOT_RECORDED))
            if len(self._recordings) < _MOST_RECORDINGS:
                self._recordings[key] = self._record(feeds, dict(zip(names, outputs, strict=True)))
            return dict(zip(names, outputs, strict=True))
        for name, array in feeds.items():
            recording.inputs[name].update_inplace(np.ascontiguousarray(array))
        self._session.run_with_iobinding(recording.binding, recording.options)
        return {name: np.array(value.numpy()) for name, value in recording.outputs.items()}

    def _record(self, feeds: Mapping[str, AnyArray], answers: Mapping[str, AnyArray]) -> _Recording:
        place = (self._device, self._device_id)
        inputs = {name: onnxruntime.OrtValue.ortvalue_from_numpy(array, *place) for name, array in feeds.items()}
        outputs = {
            name: onnxruntime.OrtValue.ortvalue_from_shape_and_type(array.shape, array.dtype.type, *place)
            for name, array in answers.items()
        }
        binding = self._session.io_binding()
        for name, value in inputs.items():
            binding.bind_ortvalue_input(name, value)
        for name, value in outputs.items():
            binding.bind_ortvalue_output(name, value)
        options = _options(str(len(self._recordings) + 1))
        return _Recording(binding=binding, inputs=inputs, outputs=outputs, options=options)


def _options(graph_id: str) -> onnxruntime.RunOptions:
    options = onnxruntime.RunOptions()
    options.add_run_config_entry("gpu_graph_id", graph_id)
    return options
