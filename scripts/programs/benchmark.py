"""Measures, in one run and as ratios, so that a noisy machine slows both sides of every comparison.

    scripts/benchmark serving      the served model beside the bare ONNX Runtime session, same threads
    scripts/benchmark loading      ten small models, configurations completed by serve beside completed by Triton

Segments of all set-ups are interleaved, round after round, and the median round counts. The load generator shares the
machine's cores with the server.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnxruntime
import torch
from rich.console import Console
from rich.table import Table
from torch import nn

from graphkiln.client import Client
from graphkiln.converters.pytorch import export_graph
from graphkiln.engines.cores import usable_cores
from graphkiln.graph.signature import Signature
from graphkiln.repository.config import config_text

REPOSITORY = Path(__file__).resolve().parents[2]
DIGITS = REPOSITORY / "model_repository" / "digits"
CACHE = REPOSITORY / ".cache" / "benchmark"
CONCURRENCIES = (1, 4)


@dataclass(frozen=True, kw_only=True)
class Segment:
    """One set-up: a function that answers one request, called by `concurrency` threads."""

    name: str
    concurrency: int
    ask: Callable[[], object]


@dataclass(frozen=True, kw_only=True)
class Figure:
    """Medians over the rounds."""

    per_second: float
    p50_ms: float
    p99_ms: float


class Bottleneck(nn.Module):
    """Residual block of ResNet-50. Source: He et al., "Deep Residual Learning", figure 5; stride in the 3x3."""

    def __init__(self, before: int, width: int, stride: int) -> None:
        super().__init__()
        after = 4 * width
        self.body = nn.Sequential(
            *(nn.Conv2d(before, width, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU()),
            *(nn.Conv2d(width, width, 3, stride, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU()),
            *(nn.Conv2d(width, after, 1, bias=False), nn.BatchNorm2d(after)),
        )
        shortcut = nn.Sequential(nn.Conv2d(before, after, 1, stride, bias=False), nn.BatchNorm2d(after))
        self.shortcut = shortcut if before != after or stride > 1 else nn.Identity()

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        """`[batch, before, h, w]` -> `[batch, 4 * width, h / stride, w / stride]`."""
        return torch.relu(self.body(features) + self.shortcut(features))


def resnet50() -> nn.Module:
    """ResNet-50 with random weights: `[batch, 3, 224, 224]` -> `[batch, 1000]`."""
    torch.manual_seed(0)
    layers: list[nn.Module] = [nn.Conv2d(3, 64, 7, 2, padding=3, bias=False), nn.BatchNorm2d(64), nn.ReLU()]
    layers.append(nn.MaxPool2d(3, 2, padding=1))
    before = 64
    for stage, blocks in enumerate((3, 4, 6, 3)):
        width = 64 * 2**stage
        for block in range(blocks):
            layers.append(Bottleneck(before, width, stride=2 if stage and not block else 1))
            before = 4 * width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(before, 1000))


def write_resnet50(store: Path) -> Path:
    """Writes the model `resnet50` into a store, from the cache when it was exported before; returns the graph."""
    cached = CACHE / "resnet50.onnx"
    if not cached.exists():
        print("exporting ResNet-50 (once)", file=sys.stderr)
        CACHE.mkdir(parents=True, exist_ok=True)
        partial = cached.with_suffix(".partial.onnx")
        export_graph(resnet50(), np.zeros((3, 224, 224), np.float32), partial)
        partial.rename(cached)
    folder = store / "resnet50" / "1"
    folder.mkdir(parents=True)
    (folder / "model.onnx").symlink_to(cached)
    with _reference_signature(cached) as signature:
        text = config_text("resnet50", signature, max_batch_size=8, preprocess=None, labels_file=None)
    (store / "resnet50" / "config.pbtxt").write_text(text)
    return cached


@contextmanager
def _reference_signature(graph: Path) -> Iterator[Signature]:
    from graphkiln.engines.onnxruntime import OnnxRuntimeEngine

    with OnnxRuntimeEngine().build_reference(graph) as session:
        yield session.signature


@contextmanager
def serving(*stores: Path, flags: tuple[str, ...] = ()) -> Iterator[tuple[str, str]]:
    """Serves stores on free ports; yields the HTTP and the gRPC URL."""
    import socket

    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(3)]
        for held in sockets:
            held.bind(("127.0.0.1", 0))
        http, grpc, metrics = (held.getsockname()[1] for held in sockets)
    ports = (f"--http-port={http}", f"--grpc-port={grpc}", f"--metrics-port={metrics}")
    folders = [f"--model-store={store}" for store in stores]
    command = [sys.executable, "-m", "graphkiln.cli", "serve", *folders, *flags, *ports]
    server = subprocess.Popen(command, stdout=sys.stderr)
    try:
        while not _ready(f"http://127.0.0.1:{http}"):
            if server.poll() is not None:
                sys.exit(f"benchmark: the server ended with code {server.returncode}")
            time.sleep(0.1)
        yield f"http://127.0.0.1:{http}", f"grpc://127.0.0.1:{grpc}"
    finally:
        server.terminate()
        server.wait(60)


def _ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/v2/health/ready", timeout=5) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def run_segment(segment: Segment, seconds: float) -> tuple[float, list[float]]:
    """Requests per second, and every latency in milliseconds."""
    latencies: list[float] = []
    deadline = time.perf_counter() + seconds

    def work() -> None:
        while (begun := time.perf_counter()) < deadline:
            segment.ask()
            latencies.append((time.perf_counter() - begun) * 1e3)

    threads = [threading.Thread(target=work) for _ in range(segment.concurrency)]
    begun = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return len(latencies) / (time.perf_counter() - begun), latencies


def measure(segments: list[Segment], rounds: int, seconds: float) -> dict[str, Figure]:
    """Interleaves the segments; the first round is a warm-up and does not count."""
    rates: dict[str, list[float]] = {segment.name: [] for segment in segments}
    latencies: dict[str, list[float]] = {segment.name: [] for segment in segments}
    for number in range(rounds + 1):
        for segment in segments:
            print(f"\r\033[Kround {number}/{rounds}: {segment.name}", end="", file=sys.stderr)
            rate, times = run_segment(segment, seconds if number else min(seconds, 1.0))
            if number:
                rates[segment.name].append(rate)
                latencies[segment.name] += times
    print("\r\033[K", end="", file=sys.stderr)
    return {
        name: Figure(
            per_second=statistics.median(rates[name]),
            p50_ms=float(np.percentile(latencies[name], 50)),
            p99_ms=float(np.percentile(latencies[name], 99)),
        )
        for name in rates
    }


def bare(graph: Path, threads: int, sample: np.ndarray) -> Callable[[], object]:
    """A bare session with ONNX Runtime's own defaults but for the number of threads."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    session = onnxruntime.InferenceSession(str(graph), options, providers=["CPUExecutionProvider"])
    name = session.get_inputs()[0].name
    return lambda: session.run(None, {name: sample})


def benchmark_serving(rounds: int, seconds: float) -> list[dict[str, object]]:
    """Digits and ResNet-50: bare session, and served over gRPC and HTTP at concurrency 1 and 4."""
    threads = usable_cores()
    rows: list[dict[str, object]] = []
    with ExitStack() as stack:
        store = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        graphs = {
            "digits": (DIGITS / "1" / "model.onnx", (1, 1, 32, 32)),
            "resnet50": (write_resnet50(store), (1, 3, 224, 224)),
        }
        http_url, grpc_url = stack.enter_context(serving(DIGITS.parent, store))
        for model, (graph, shape) in graphs.items():
            sample = np.random.default_rng(0).normal(size=shape).astype(np.float32)
            segments = [Segment(name="bare session", concurrency=1, ask=bare(graph, threads, sample))]
            for protocol, url in (("gRPC", grpc_url), ("HTTP", http_url)):
                served = stack.enter_context(Client(url)).model(model)
                segments += [
                    Segment(
                        name=f"{protocol}, concurrency {concurrency}",
                        concurrency=concurrency,
                        ask=lambda served=served, sample=sample: served.infer({"INPUT_0": sample}),  # type: ignore[misc]
                    )
                    for concurrency in CONCURRENCIES
                ]
            figures = measure(segments, rounds, seconds)
            reference = figures["bare session"].per_second
            rows += [
                {
                    "model": model,
                    "set-up": name,
                    "requests/s": round(figure.per_second, 1),
                    "ratio": round(figure.per_second / reference, 3),
                    "p50 ms": round(figure.p50_ms, 2),
                    "p99 ms": round(figure.p99_ms, 2),
                }
                for name, figure in figures.items()
            ]
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
    "serving": (benchmark_serving, "batch 1 a request, ratio to the bare session of the same threads"),
    "loading": (benchmark_loading, "from the command until every model is ready, ratio to Triton's completion"),
}


def main() -> None:
    """Runs a benchmark and prints its table."""
    parser = argparse.ArgumentParser(
        prog="scripts/benchmark", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("benchmark", choices=BENCHMARKS, help="what to measure")
    parser.add_argument("--rounds", type=int, default=5, help="interleaved rounds that count (default: 5)")
    parser.add_argument("--seconds", type=float, default=3.0, help="seconds a segment (default: 3)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    options = parser.parse_args()
    run, title = BENCHMARKS[options.benchmark]
    rows = run(options.rounds, options.seconds)
    if options.json:
        print(json.dumps({"cores": usable_cores(), "load_average": os.getloadavg(), "rows": rows}, indent=2))
        return
    table = Table(title=f"{usable_cores()} cores, {title}")
    for column in rows[0]:
        table.add_column(column, justify="left" if column in ("model", "set-up") else "right")
    for row in rows:
        table.add_row(
            *map(str, row.values()), end_section=str(row["set-up"]) == f"HTTP, concurrency {CONCURRENCIES[-1]}"
        )
    Console().print(table)


if __name__ == "__main__":
    main()
