"""A fake server for the page: a classifier of two brightnesses with a table of responses."""

from __future__ import annotations

import io
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from fake_transport import FakeTransport
from PIL import Image

from graphkiln.page.server import ShownServer, Stores
from graphkiln_backend.graph.contract import Contract, Contracts
from graphkiln_backend.graph.dtypes import DType
from graphkiln_backend.graph.preprocess import Preprocess
from graphkiln_backend.graph.task import Task
from graphkiln_client import AsyncClient
from graphkiln_client.transports.base import InferRequest, InferResponse

PIXELS = Preprocess(dtype=DType.UINT8, layout="HWC")
LABELS = ("dark", "<img src=x onerror=alert(1)>")
# Metrics of a rollout, to be appended to `METRICS`.
ROLLOUT = """
graphkiln_rollout_info{{model="m",version="2",phase="{phase}",by="{by}",serving="1"}} 1
graphkiln_rollout_share{{model="m",version="2"}} 0.05
graphkiln_rollout_compared_total{{model="m",version="2"}} {compared}
graphkiln_rollout_disagreed_total{{model="m",version="2"}} 4
graphkiln_rollout_undecided_total{{model="m",version="2"}} 0
graphkiln_rollout_answered_total{{model="m",version="2"}} 0
graphkiln_rollout_dropped_total{{model="m",version="2"}} 7
graphkiln_rollout_failed_total{{model="m",version="2"}} 1
graphkiln_rollout_agreement{{model="m",version="2",bound="lower"}} 0.9914
graphkiln_rollout_agreement{{model="m",version="2",bound="upper"}} 0.9995
graphkiln_rollout_agreement_limit{{model="m",version="2"}} 0.995
graphkiln_rollout_latency_seconds{{model="m",version="2",role="serving",quantile="0.5"}} 0.00304
graphkiln_rollout_latency_seconds{{model="m",version="2",role="serving",quantile="0.99"}} 0.0081
graphkiln_rollout_latency_seconds{{model="m",version="2",role="candidate",quantile="0.5"}} 0.0029
graphkiln_rollout_latency_seconds{{model="m",version="2",role="candidate",quantile="0.99"}} 0.0079
"""
METRICS = Path(__file__).parents[1] / "unit" / "page" / "metrics.txt"


def encoded(width: int = 1, height: int = 1, brightness: int = 200) -> bytes:
    """Encode a gray image as PNG."""
    content = io.BytesIO()
    Image.new("RGB", (width, height), (brightness,) * 3).save(content, "PNG")
    return content.getvalue()


def brightness(request: InferRequest, timeout_s: float) -> InferResponse:
    """Probabilities of two classes for an image of any shape."""
    del timeout_s
    mean = np.asarray(request.inputs["X"]).mean(axis=(1, 2, 3))
    scores = np.stack([255 - mean, mean], axis=1).astype(np.float32) / 255
    return InferResponse(model="m", version="1", outputs={"Y": scores})


def counted(requests: int) -> dict[str, Any]:
    """Statistics after that many requests: each waited 2 ms and computed 1 + 3 + 1 ms."""
    each_ns = {"queue": 2_000_000, "compute_input": 1_000_000, "compute_infer": 3_000_000, "compute_output": 1_000_000}
    phases = {name: {"count": requests, "ns": requests * ns} for name, ns in each_ns.items()}
    row = {"name": "m", "version": "1", "inference_stats": {"success": {"count": requests}, **phases}}
    return {"model_stats": [row]}


def config(task: Task | None = None, *, takes_images: bool = True) -> dict[str, Any]:
    """Published configuration of the model."""
    if not takes_images:
        return {"max_batch_size": 4}
    contract = Contract(preprocess=PIXELS, labels=LABELS, output="" if task else "Y", task=task)
    text = Contracts.of({"1": contract}).to_json()
    return {"max_batch_size": 4, "parameters": {"contracts": {"string_value": text}}}


def responses() -> dict[str, Any]:
    """Responses of a server that works."""
    row = {"name": "X", "datatype": "UINT8", "shape": [-1, -1, -1, 3]}
    return {
        "model_metadata": {
            "versions": ["1"],
            "inputs": [row],
            "outputs": [{"name": "Y", "datatype": "FP32", "shape": [-1, 2]}],
        },
        "model_config": config(),
        "model_statistics": [counted(3), counted(3), counted(4)],
        "repository_index": [
            {"name": "m", "version": "1", "state": "READY"},
            {"name": "b", "version": "2", "state": "UNAVAILABLE", "reason": "it is damaged"},
        ],
        "load": None,
        "unload": None,
        "infer": brightness,
    }


@dataclass
class Shown:
    """A page's server with fake transports.

    Attributes:
        transport: What answers without a key.
        keys: Those that clients were opened with.
    """

    folder: Path
    transport: FakeTransport = field(default_factory=lambda: FakeTransport(responses()))
    keys: list[str] = field(default_factory=list)

    def connect(self, key: str) -> AsyncClient:
        self.keys.append(key)
        return AsyncClient("http://127.0.0.1:1", max_retries=0, transport_for=lambda *_: self.transport)

    def server(self) -> ShownServer:
        return ShownServer(
            connect=self.connect,
            stores=Stores([self.folder]),
            url="http://127.0.0.1:8000",
            metrics_url=METRICS.as_uri(),
        )

    def answer_in_turn(self, *counts: int) -> None:
        """Set the statistics of the next readings."""
        self.transport.responses["model_statistics"] = [counted(count) for count in counts]
