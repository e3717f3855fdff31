"""The server beside the bare runtime: throughput, what the backend adds, memory over many requests, start-up."""

from __future__ import annotations

import json
import statistics
import tempfile
import time
import urllib.request
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import numpy as np
import onnxruntime
import psutil
from inputs import exported_graph
from measurement import SetUp, Summary, measure
from stores import DIGITS, add_model

from graphkiln.story.server import start_server
from graphkiln_backend.graph.dtypes import AnyArray
from graphkiln_backend.system.resources import usable_cores
from graphkiln_client import Client

_CONCURRENCIES = (1, 4)
_DIGIT = (1, 1, 32, 32)
_IMAGE = (1, 3, 224, 224)
_TWO_INSTANCES = "\ninstance_group { count: 2 kind: KIND_CPU }\n"
_REQUESTS = 40_000
"""Between two readings of the server's memory."""


def benchmark_serving(rounds: int, seconds: float) -> list[dict[str, object]]:
    """Bare session, and served over gRPC and HTTP: one instance with all cores, then two that share them."""
    rows: list[dict[str, object]] = []
    mobilenet, resnet = exported_graph("mobilenet_v3_small"), exported_graph("resnet50")
    with ExitStack() as stack:
        store = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        add_model(store, "resnet50", resnet)
        add_model(store, "mobilenet", mobilenet)
        add_model(store, "mobilenet-x2", mobilenet, _TWO_INSTANCES)
        urls = stack.enter_context(start_server(DIGITS.parent, store)).urls
        cores = usable_cores()
        # model, graph, shape of a request, threads and number of the bare sessions, concurrencies
        comparisons = (
            ("digits", DIGITS / "1" / "model.onnx", _DIGIT, cores, 1, _CONCURRENCIES),
            ("resnet50", resnet, _IMAGE, cores, 1, _CONCURRENCIES),
            ("mobilenet", mobilenet, _IMAGE, cores, 1, _CONCURRENCIES),
            ("mobilenet-x2", mobilenet, _IMAGE, 1, 2, (8,)),
        )
        for model, graph, shape, threads, sessions, concurrencies in comparisons:
            sample = _sample(shape)
            reference = f"{sessions} bare session{'s' if sessions > 1 else ''}"
            set_ups = [SetUp(name=reference, concurrency=sessions, request=_bare_session(graph, threads, sample))]
            for protocol, url in zip(("HTTP", "gRPC"), urls, strict=True):
                served = stack.enter_context(Client(url)).model(model)
                request = partial(served.infer, {"INPUT_0": sample})
                set_ups += [
                    SetUp(name=f"{protocol}, concurrency {concurrency}", concurrency=concurrency, request=request)
                    for concurrency in concurrencies
                ]
            rows += _ratios(model, measure(set_ups, rounds, seconds), reference)
    return rows


def benchmark_overhead(rounds: int, seconds: float) -> list[dict[str, object]]:
    """What the backend adds inside the server, by Triton's statistics, for requests of 4 kB and of 600 kB."""
    graph = exported_graph("mobilenet_v3_small")
    rows: list[dict[str, object]] = []
    with ExitStack() as stack:
        store = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        add_model(store, "mobilenet", graph)
        http_url, grpc_url = stack.enter_context(start_server(DIGITS.parent, store)).urls
        for model, path, shape in (("digits", DIGITS / "1" / "model.onnx", _DIGIT), ("mobilenet", graph, _IMAGE)):
            sample = _sample(shape)
            served = stack.enter_context(Client(grpc_url)).model(model)
            bare = _bare_session(path, usable_cores(), sample)
            set_ups = [
                SetUp(name="bare session", concurrency=1, request=bare),
                SetUp(name="served", concurrency=1, request=partial(served.infer, {"INPUT_0": sample})),
            ]
            before = _statistics(http_url, model)
            bare_us = measure(set_ups, rounds, seconds)["bare session"].p50_ms * 1e3
            parts = _mean_us(before, _statistics(http_url, model))
            rows.append(
                {
                    "model": model,
                    "request": f"{sample.nbytes / 1e3:.0f} kB",
                    "bare us": round(bare_us),
                    **{f"{part} us": round(value) for part, value in parts.items()},
                    "added us": round(sum(parts.values()) - bare_us),
                    "ratio": round(sum(parts.values()) / bare_us, 3),
                }
            )
    return rows


def benchmark_growth(rounds: int, _: float) -> list[dict[str, object]]:
    """Memory of the server's processes after every 40,000 requests, a warm-up of 20,000 not counted."""
    sample = _sample(_DIGIT)
    rows: list[dict[str, object]] = []
    with start_server(DIGITS.parent) as server, Client(server.grpc_url) as client:
        model = client.model("digits")
        children = psutil.Process().children(recursive=True)
        processes = [process for process in children if process.name().startswith("triton")]
        first_mb = 0.0
        for number in range(rounds + 1):
            requests = range(_REQUESTS if number else _REQUESTS // 2)
            with ThreadPoolExecutor(4) as pool:
                deque(pool.map(lambda _: model.infer({"INPUT_0": sample}), requests), 0)
            memory_mb = sum(process.memory_full_info().pss for process in processes) / 2**20
            first_mb = first_mb or round(memory_mb, 2)
            rows.append(
                {
                    "model": "digits",
                    "requests": _REQUESTS * number,
                    "MB": round(memory_mb, 2),
                    "ratio": round(memory_mb / first_mb, 3),
                }
            )
    return rows


def benchmark_loading(rounds: int, _: float) -> list[dict[str, object]]:
    """Ten copies of the digits graph without configuration: seconds from the command until every model is ready."""
    flags_by_name = {"completed by serve": (), "completed by Triton": ("--strict-model-config=false",)}
    seconds: dict[str, list[float]] = {name: [] for name in flags_by_name}
    with tempfile.TemporaryDirectory() as store:
        for number in range(10):
            folder = Path(store) / f"model{number}" / "1"
            folder.mkdir(parents=True)
            (folder / "model.onnx").symlink_to(DIGITS / "1" / "model.onnx")
        for _round in range(rounds):
            for name, flags in flags_by_name.items():
                begun = time.perf_counter()
                with start_server(Path(store), flags=flags):
                    seconds[name].append(time.perf_counter() - begun)
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    return [
        {
            "model": "ten digits",
            "set-up": name,
            "ready after s": round(value, 2),
            "ratio": round(value / medians["completed by Triton"], 3),
        }
        for name, value in medians.items()
    ]


def _sample(shape: tuple[int, ...]) -> AnyArray:
    return np.random.default_rng(0).normal(size=shape).astype(np.float32)


def _bare_session(graph: Path, threads: int, sample: AnyArray) -> Callable[[], object]:
    """A bare session with ONNX Runtime's own defaults but for the number of threads."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    session = onnxruntime.InferenceSession(str(graph), options, providers=["CPUExecutionProvider"])
    name = session.get_inputs()[0].name
    return lambda: session.run(None, {name: sample})


def _ratios(model: str, summaries: dict[str, Summary], reference: str) -> list[dict[str, object]]:
    return [
        {
            "model": model,
            "set-up": name,
            "requests/s": round(summary.per_second, 1),
            "ratio": round(summary.per_second / summaries[reference].per_second, 3),
            "spread": summary.spread_beside(summaries[reference]),
            "p50 ms": round(summary.p50_ms, 2),
            "p99 ms": round(summary.p99_ms, 2),
        }
        for name, summary in summaries.items()
    ]


def _statistics(url: str, model: str) -> dict[str, tuple[int, int]]:
    """Nanoseconds and number of requests by part of the work. Source: Triton's statistics extension."""
    with urllib.request.urlopen(f"{url}/v2/models/{model}/stats") as response:
        statistics_ = json.load(response)["model_stats"][0]["inference_stats"]
    stages = {part: statistics_[f"compute_{part}"] for part in ("input", "infer", "output")}
    return {part: (stage["ns"], stage["count"]) for part, stage in stages.items()}


def _mean_us(before: dict[str, tuple[int, int]], after: dict[str, tuple[int, int]]) -> dict[str, float]:
    """Mean microseconds of each part between two readings."""
    return {part: (ns - before[part][0]) / (count - before[part][1]) / 1e3 for part, (ns, count) in after.items()}
