"""OpenVINO's own ways to spread a graph, the nearest peer: streams of one CPU, and HETERO over devices."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import openvino
from openvino.properties.hint import ModelDistributionPolicy

from graphkiln_backend.engines.openvino_graph import open_core
from graphkiln_backend.graph.dtypes import AnyArray
from graphkiln_backend.graph.errors import LoweringError, MeasurementError

WAYS: Mapping[str, str] = {"OpenVINO, 2 streams": "CPU", "OpenVINO HETERO:CPU": "HETERO:CPU"}
"""Set-up -> OpenVINO's name of what it runs on."""
LIMIT_S = 300.0
"""Of a request, which takes seconds."""
CALLERS = 2
"""Requests under way: one for each stream, or for each stage that HETERO would make."""


class Peer:
    """A graph as OpenVINO runs it, in fp32, on two cores of a CPU.

    Args:
        graph: The graph.
        devices: OpenVINO's name of a device, or `HETERO:` and several: it is asked to make stages of them.

    Raises:
        LoweringError: OpenVINO refuses the graph or the devices.
    """

    def __init__(self, graph: Path, devices: str) -> None:
        core = open_core()
        core.set_property("CPU", {"INFERENCE_PRECISION_HINT": "f32", "INFERENCE_NUM_THREADS": CALLERS})
        wanted: dict[str, Any] = {"NUM_STREAMS": CALLERS}
        if devices.startswith("HETERO"):
            wanted = {"MODEL_DISTRIBUTION_POLICY": {ModelDistributionPolicy.PIPELINE_PARALLEL}}
        try:
            self._model = core.compile_model(str(graph), devices, wanted)
        except RuntimeError as error:
            raise LoweringError(f"OpenVINO on {devices}", attempts=(str(error).strip().splitlines()[-1],)) from error
        self._free: SimpleQueue[openvino.InferRequest] = SimpleQueue()
        for _ in range(CALLERS):
            self._free.put(self._model.create_infer_request())

    @property
    def devices(self) -> tuple[str, ...]:
        """What it says that it runs on."""
        return tuple(self._model.get_property("EXECUTION_DEVICES"))

    def run(self, feeds: Mapping[str, AnyArray]) -> object:
        """Computes a batch on the next request that is free; from as many threads as there are callers.

        Raises:
            MeasurementError: OpenVINO does not answer.
        """
        request = self._free.get()
        try:
            request.start_async(dict(feeds), share_inputs=True)
            if not request.wait_for(int(LIMIT_S * 1000)):
                raise MeasurementError(f"OpenVINO did not answer within {LIMIT_S:g} s")
            return request.results
        finally:
            self._free.put(request)
