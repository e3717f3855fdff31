"""Rates of the client beside raw tritonclient, at the same concurrency."""

from __future__ import annotations

import importlib
import tempfile
import threading
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import onnx
from inputs import add_model
from measurement import measure, ratio_of
from onnx import TensorProto, helper

from graphkiln.story.server import start_server
from graphkiln_client import Client

SIZES = {"1 kB": 256, "600 kB": 150_528}


def write_mean_graph(path: Path, elements: int) -> None:
    """Write a graph of negligible cost: the mean of a row."""
    node = helper.make_node("ReduceMean", ["X"], ["Y"], axes=[1], keepdims=1)
    declared = [
        helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", size])
        for name, size in (("X", elements), ("Y", 1))
    ]
    graph = helper.make_graph([node], "mean", declared[:1], declared[1:])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8), path)


def write_mean_models(folder: Path) -> Path:
    """Write a store of a model `mean<elements>` for each of `SIZES` into a folder; return the store."""
    for elements in SIZES.values():
        write_mean_graph(folder / f"{elements}.onnx", elements)
        add_model(folder / "store", f"mean{elements}", folder / f"{elements}.onnx")
    return folder / "store"


def _tritonclient_request(protocol: str, address: str, model: str, sample: Any) -> Callable[[], object]:
    """Request by tritonclient; its HTTP client is not thread-safe, so each thread has one."""
    library: Any = importlib.import_module(f"tritonclient.{protocol}")
    clients = threading.local()
    shared = library.InferenceServerClient(address) if protocol == "grpc" else None

    def request() -> object:
        client = shared or getattr(clients, "client", None)
        if client is None:
            client = clients.client = library.InferenceServerClient(address)
        tensor = library.InferInput("X", list(sample.shape), "FP32")
        tensor.set_data_from_numpy(sample)
        return client.infer(model, [tensor]).as_numpy("Y")

    return request


def benchmark_client(rounds: int, seconds: float) -> list[dict[str, object]]:
    """`infer` beside raw tritonclient, and through shared memory: both protocols, 1 and 8 callers, small and large."""
    rows: list[dict[str, object]] = []
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        urls = stack.enter_context(start_server(write_mean_models(folder))).urls
        clients = {url: stack.enter_context(Client(url)) for url in urls}
        shared = {url: stack.enter_context(clients[url].shared_memory()) for url in urls}
        for name, elements in SIZES.items():
            sample = np.random.default_rng(0).normal(size=(1, elements)).astype(np.float32)
            model = f"mean{elements}"
            for url in urls:
                protocol, _, address = url.partition("://")
                feeds = {"X": sample}
                requests: dict[str, Callable[[], object]] = {
                    "tritonclient": _tritonclient_request(protocol, address, model, sample),
                    "graphkiln": partial(clients[url].model(model).infer, feeds),
                    "shared memory": partial(shared[url].model(model).infer, feeds),
                }
                rows += compare(f"{name} {protocol}", requests, rounds, seconds, percentile="p99")
    return rows


def compare(
    label: str,
    requests: Mapping[str, Callable[[], object]],
    rounds: int,
    seconds: float,
    *,
    percentile: Literal["p50", "p99"],
) -> list[dict[str, object]]:
    """Compare rates and latency of set-ups with the first one, with 1 and 8 callers; a row each."""
    rows: list[dict[str, object]] = []
    for callers in (1, 8):
        summaries = measure(requests, callers, rounds, seconds)
        base = next(iter(summaries.values()))
        base_ms = getattr(base, f"{percentile}_ms")
        for name, summary in summaries.items():
            latency_ms = getattr(summary, f"{percentile}_ms")
            rows.append(
                {
                    "model": f"{label}, {callers}",
                    "set-up": name,
                    "requests/s": round(summary.per_second, 1),
                    "ratio": round(summary.per_second / base.per_second, 3),
                    "spread": ratio_of(summary.rates, base.rates).spread,
                    f"{percentile} ms": round(latency_ms, 2),
                    f"{percentile} ratio": round(latency_ms / base_ms, 2),
                }
            )
    return rows
