"""Measures, in one run and as ratios, so that a noisy machine slows both sides of every comparison.

    scripts/benchmark serving      the served model beside the bare ONNX Runtime session, same threads
    scripts/benchmark overhead     what the backend adds inside the server
    scripts/benchmark memory       whether memory grows with the number of requests
    scripts/benchmark lowering     ResNet-101 in each precision, beside ONNX Runtime in fp32
    scripts/benchmark load         loading what was lowered: the first time, and from the cache
    scripts/benchmark session      what a session adds to the runtime's own call, what the self-test costs
    scripts/benchmark client       the client's infer beside raw tritonclient: throughput and p99
    scripts/benchmark images     classify_many beside a loop, preprocessing beside torchvision, the import
    scripts/benchmark loading      ten small models, configurations completed by serve beside completed by Triton
    scripts/benchmark story        the acceleration story of ResNet-101 (weights: scripts/train-story)
    scripts/benchmark peers        JPEG to top-5 beside FastAPI, LitServe, BentoML, MLServer, PyTriton and Ray Serve
    scripts/benchmark all          all of these, one after the other, into docs/benchmarks.md
    scripts/benchmark report       writes docs/benchmarks.md and the README's tables again from what is kept

Segments of all set-ups are interleaved, round after round, and the median round counts. The load generator shares the
machine's cores with the server.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
import urllib.request
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import onnxruntime
import psutil
import reporting
from client_speed import benchmark_client, benchmark_images
from lowering import benchmark_lowered_load, benchmark_lowering, benchmark_session
from measuring import Figure, Segment, exported, measure
from peers_speed import benchmark_peers
from rich.console import Console
from rich.table import Table
from served import DIGITS, add_model
from story_speed import benchmark_story

from graphkiln.story.server import serving
from graphkiln_backend.engines.cores import usable_cores
from graphkiln_backend.graph.dtypes import AnyArray
from graphkiln_client import Client

CONCURRENCIES = (1, 4)
_FILE_WIDTH = 160
"""Columns of a table that goes to a file."""


def bare(graph: Path, threads: int, sample: AnyArray) -> Callable[[], object]:
    """A bare session with ONNX Runtime's own defaults but for the number of threads."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    session = onnxruntime.InferenceSession(str(graph), options, providers=["CPUExecutionProvider"])
    name = session.get_inputs()[0].name
    return lambda: session.run(None, {name: sample})


IMAGE = (1, 3, 224, 224)
TWO_INSTANCES = "\ninstance_group { count: 2 kind: KIND_CPU }\n"


def benchmark_serving(rounds: int, seconds: float) -> list[dict[str, object]]:
    """Bare session, and served over gRPC and HTTP: one instance with all cores, then two that share them."""
    rows: list[dict[str, object]] = []
    mobilenet, resnet = exported("mobilenet_v3_small"), exported("resnet50")
    with ExitStack() as stack:
        store = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        add_model(store, "resnet50", resnet)
        add_model(store, "mobilenet", mobilenet)
        add_model(store, "mobilenet-x2", mobilenet, TWO_INSTANCES)
        urls = stack.enter_context(serving(DIGITS.parent, store)).urls
        cores = usable_cores()
        # model, graph, shape of a request, threads and number of the bare sessions, concurrencies
        set_ups = (
            ("digits", DIGITS / "1" / "model.onnx", (1, 1, 32, 32), cores, 1, CONCURRENCIES),
            ("resnet50", resnet, IMAGE, cores, 1, CONCURRENCIES),
            ("mobilenet", mobilenet, IMAGE, cores, 1, CONCURRENCIES),
            ("mobilenet-x2", mobilenet, IMAGE, 1, 2, (8,)),
        )
        for model, graph, shape, threads, sessions, concurrencies in set_ups:
            sample = np.random.default_rng(0).normal(size=shape).astype(np.float32)
            reference = f"{sessions} bare session{'s' if sessions > 1 else ''}"
            segments = [Segment(name=reference, concurrency=sessions, ask=bare(graph, threads, sample))]
            for protocol, url in zip(("HTTP", "gRPC"), urls, strict=True):
                served = stack.enter_context(Client(url)).model(model)
                segments += [
                    Segment(
                        name=f"{protocol}, concurrency {concurrency}",
                        concurrency=concurrency,
                        ask=lambda served=served, sample=sample: served.infer({"INPUT_0": sample}),  # type: ignore[misc]
                    )
                    for concurrency in concurrencies
                ]
            rows += _ratios(model, measure(segments, rounds, seconds), reference)
    return rows


def _ratios(model: str, figures: dict[str, Figure], reference: str) -> list[dict[str, object]]:
    return [
        {
            "model": model,
            "set-up": name,
            "requests/s": round(figure.per_second, 1),
            "ratio": round(figure.per_second / figures[reference].per_second, 3),
            "p50 ms": round(figure.p50_ms, 2),
            "p99 ms": round(figure.p99_ms, 2),
        }
        for name, figure in figures.items()
    ]


def benchmark_overhead(rounds: int, seconds: float) -> list[dict[str, object]]:
    """What the backend adds inside the server, by Triton's statistics, for requests of 4 kB and of 600 kB."""
    graph = exported("mobilenet_v3_small")
    rows: list[dict[str, object]] = []
    with ExitStack() as stack:
        store = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        add_model(store, "mobilenet", graph)
        http_url, grpc_url = stack.enter_context(serving(DIGITS.parent, store)).urls
        for model, path, shape in (
            ("digits", DIGITS / "1" / "model.onnx", (1, 1, 32, 32)),
            ("mobilenet", graph, IMAGE),
        ):
            sample = np.random.default_rng(0).normal(size=shape).astype(np.float32)
            served = stack.enter_context(Client(grpc_url)).model(model)
            segments = [
                Segment(name="bare session", concurrency=1, ask=bare(path, usable_cores(), sample)),
                Segment(
                    name="served",
                    concurrency=1,
                    ask=lambda served=served, sample=sample: served.infer({"INPUT_0": sample}),  # type: ignore[misc]
                ),
            ]
            before = _statistics(http_url, model)
            figures = measure(segments, rounds, seconds)
            parts = {
                part: (ns - before[part][0]) / (count - before[part][1]) / 1e3
                for part, (ns, count) in _statistics(http_url, model).items()
            }
            bare_us = figures["bare session"].p50_ms * 1e3
            rows.append(
                {
                    "model": model,
                    "request": f"{sample.nbytes / 1e3:.0f} kB",
                    "bare us": round(bare_us),
                    **{f"{part} us": round(value) for part, value in parts.items()},
                    "added us": round(sum(parts.values()) - bare_us),
                }
            )
    return rows


def _statistics(url: str, model: str) -> dict[str, tuple[int, int]]:
    """Nanoseconds and number of requests by part of the work. Source: Triton's statistics extension."""
    with urllib.request.urlopen(f"{url}/v2/models/{model}/stats") as answer:
        found = json.load(answer)["model_stats"][0]["inference_stats"]
    return {
        part: (found[f"compute_{part}"]["ns"], found[f"compute_{part}"]["count"])
        for part in ("input", "infer", "output")
    }


def benchmark_memory(rounds: int, _: float) -> list[dict[str, object]]:
    """Memory of the server's processes after every 40,000 requests, a warm-up of 20,000 not counted."""
    sample = np.random.default_rng(0).normal(size=(1, 1, 32, 32)).astype(np.float32)
    rows: list[dict[str, object]] = []
    with serving(DIGITS.parent) as server, Client(server.grpc_url) as client:
        model = client.model("digits")
        processes = [
            process for process in psutil.Process().children(recursive=True) if process.name().startswith("triton")
        ]
        for number in range(rounds + 1):
            with ThreadPoolExecutor(4) as pool:
                deque(pool.map(lambda _: model.infer({"INPUT_0": sample}), range(40_000 if number else 20_000)), 0)
            memory = [process.memory_full_info().pss / 2**20 for process in processes]
            first = sum(memory) if not number else float(str(rows[0]["MB"]))
            rows.append(
                {"model": "digits", "requests": 40_000 * number, "MB": round(sum(memory), 2),
                 "ratio": round(sum(memory) / first, 3)}
            )  # fmt: skip
    return rows


def benchmark_loading(rounds: int, _: float) -> list[dict[str, object]]:
    """Ten copies of the digits graph without configuration: seconds from the command until every model is ready."""
    set_ups = {"completed by serve": (), "completed by Triton": ("--strict-model-config=false",)}
    seconds: dict[str, list[float]] = {name: [] for name in set_ups}
    with tempfile.TemporaryDirectory() as store:
        for number in range(10):
            folder = Path(store) / f"model{number}" / "1"
            folder.mkdir(parents=True)
            (folder / "model.onnx").symlink_to(DIGITS / "1" / "model.onnx")
        for _ in range(rounds):
            for name, flags in set_ups.items():
                begun = time.perf_counter()
                with serving(Path(store), flags=flags):
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


BENCHMARKS = {
    "lowering": (benchmark_lowering, "threads = cores, ratio to ONNX Runtime in fp32 of the same batch"),
    "load": (benchmark_lowered_load, "seconds to load, ratio of the first to the cached load"),
    "session": (benchmark_session, "one image a run, ratio of our session to the runtime's own call"),
    "serving": (benchmark_serving, "batch 1 a request, ratio to the bare session of the same threads"),
    "overhead": (benchmark_overhead, "what the backend adds to a bare run, inside the server"),
    "client": (benchmark_client, "infer, ratio to raw tritonclient at the same concurrency"),
    "images": (benchmark_images, "ratio: how often faster than the reference"),
    "memory": (benchmark_memory, "memory of tritonserver and its stubs, ratio to the first row"),
    "loading": (benchmark_loading, "from the command until every model is ready, ratio to Triton's completion"),
    "story": (benchmark_story, "ResNet-101 from eager PyTorch to a served graph, each step proven"),
    "peers": (benchmark_peers, "ResNet-50, JPEG to top-5, 8 callers, ratio to the best peer"),
}


def main() -> None:
    """Runs a benchmark and prints its table."""
    parser = argparse.ArgumentParser(
        prog="scripts/benchmark", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("benchmark", choices=[*BENCHMARKS, "all", "report"], help="what to measure")
    parser.add_argument("--rounds", type=int, default=5, help="interleaved rounds that count (default: 5)")
    parser.add_argument("--seconds", type=float, default=3.0, help="seconds a segment (default: 3)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--save", action="store_true", help="keep the result in docs/benchmarks and docs/benchmarks.md")
    options = parser.parse_args()
    for name in BENCHMARKS if options.benchmark == "all" else [options.benchmark]:
        if name != "report":
            _measure(name, options)
    if options.save or options.benchmark in ("all", "report"):
        reporting.write()


def _measure(name: str, options: argparse.Namespace) -> None:
    run, title = BENCHMARKS[name]
    rows = run(options.rounds, options.seconds)
    if options.save or options.benchmark == "all":
        command = f"scripts/benchmark {name} --rounds {options.rounds} --seconds {options.seconds:g}"
        reporting.save(name, title, command, rows)
    if options.json:
        print(json.dumps({"cores": usable_cores(), "load_average": os.getloadavg(), "rows": rows}, indent=2))
        return
    table = Table(title=f"{usable_cores()} cores, {title}")
    for column in rows[0]:
        table.add_column(column, justify="left" if column in ("model", "set-up") else "right")
    for row in rows:
        table.add_row(*map(str, row.values()))
    Console(width=None if sys.stdout.isatty() else _FILE_WIDTH).print(table)


if __name__ == "__main__":
    main()
