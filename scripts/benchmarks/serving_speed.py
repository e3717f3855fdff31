"""Rates of served models beside bare sessions, or beside Triton's own C++ onnxruntime backend if given."""

from __future__ import annotations

import json
import shutil
import statistics
import tempfile
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import onnxruntime
import psutil
from inputs import add_model, exported_graph, openvino_settings, parameters
from measurement import ratio_of, take_turns
from servers import PERF_ANALYZER, Load, check_backend, measure_load, native_flags, start_cpp_server

from graphkiln.bench.generator import measure_throughput
from graphkiln.story.server import LocalServer, start_server
from graphkiln_backend.repository.config import BACKEND, DROP_IN_BACKEND

OURS, CPP, BARE = "graphkiln", "C++ backend", "bare session"
_STAGES = ("queue", "compute_input", "compute_infer", "compute_output")


@dataclass(frozen=True, kw_only=True)
class Variant:
    """A graph and its serving configuration.

    Attributes:
        name: Name of the served model.
        architecture: torchvision's name.
        instances: Number of instances.
        threads: Threads per instance.
        concurrencies: Numbers of concurrent callers.
        openvino: Whether our backend uses OpenVINO; the C++ backend always uses ONNX Runtime in fp32.
    """

    name: str
    architecture: str
    instances: int
    threads: int
    concurrencies: tuple[int, ...]
    openvino: bool = False


VARIANTS = (
    Variant(name="mobilenet-1x2", architecture="mobilenet_v3_small", instances=1, threads=2, concurrencies=(1, 8)),
    Variant(name="mobilenet-2x1", architecture="mobilenet_v3_small", instances=2, threads=1, concurrencies=(8,)),
    Variant(
        name="mobilenet-openvino-1x2", architecture="mobilenet_v3_small", instances=1, threads=2, concurrencies=(1, 8),
        openvino=True,
    ),
    Variant(
        name="mobilenet-openvino-2x1", architecture="mobilenet_v3_small", instances=2, threads=1, concurrencies=(8,),
        openvino=True,
    ),
    Variant(name="resnet50-1x2", architecture="resnet50", instances=1, threads=2, concurrencies=(1, 4)),
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One measurement of one server.

    Attributes:
        load: Result of the load generator.
        server_us: Triton's mean times of a request in microseconds, by stage.
        batch: Mean size of the batches.
        cpu_ms: CPU time per request of all processes of the server.
    """

    load: Load
    server_us: Mapping[str, float]
    batch: float
    cpu_ms: float


Run = Callable[[float], Sample]


def benchmark_serving(rounds: int, seconds: float, cpp_backend: Path | None) -> list[dict[str, object]]:
    """Measure each set-up over HTTP and gRPC; servers take turns, and the load comes from the same generator."""
    generator = PERF_ANALYZER if shutil.which(PERF_ANALYZER) else "graphkiln bench"
    rows: list[dict[str, object]] = []
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        servers = {
            OURS: stack.enter_context(
                start_server(variant_store(folder / "ours", VARIANTS, ours=True), flags=native_flags(cpp_backend))
            )
        }
        if cpp_backend:
            backends, store = check_backend(cpp_backend), variant_store(folder / "cpp", VARIANTS, ours=False)
            servers[CPP] = stack.enter_context(start_cpp_server(backends, store))
        cases = [(variant, protocol, count) for variant in VARIANTS for protocol in ("HTTP", "gRPC")
                 for count in variant.concurrencies]  # fmt: skip
        for variant, protocol, concurrency in cases:
            title = f"{variant.name}, {protocol}, {concurrency}"
            runs: dict[str, Run] = {}
            for name, server in servers.items():
                url = server.http_url if protocol == "HTTP" else server.grpc_url
                load = partial(measure_load, url, variant.name, concurrency)
                runs[name] = partial(_measure_server, server, variant.name, load)
            if not cpp_backend:
                runs[BARE] = _bare_run(variant, concurrency)
            rows += rows_of(title, generator, take_turns(f"{title}, ", runs, rounds, seconds))
    return rows


def variant_store(folder: Path, variants: Sequence[Variant], *, ours: bool) -> Path:
    """Make a model store of variants for our backend or for Triton's C++ backend; return its folder."""
    for variant in variants:
        graph = exported_graph(variant.architecture)
        settings = {"threads" if ours else "intra_op_thread_count": str(variant.threads)}
        settings |= openvino_settings() if ours and variant.openvino else {}
        text = f"\ninstance_group {{ count: {variant.instances} kind: KIND_CPU }}\n{parameters(settings)}"
        add_model(folder, variant.name, graph, text, backend=BACKEND if ours else DROP_IN_BACKEND, golden=ours)
    return folder


def _measure_server(server: LocalServer, model: str, generate: Callable[[float], Load], seconds: float) -> Sample:
    before, cpu_s = read_statistics(server.http_url, model), _cpu_seconds(server.pid)
    load = generate(seconds)
    cpu_s = _cpu_seconds(server.pid) - cpu_s
    grown = {name: value - before[name] for name, value in read_statistics(server.http_url, model).items()}
    requests = max(grown["requests"], 1)
    return Sample(
        load=load,
        server_us={stage: grown[stage] / requests / 1e3 for stage in _STAGES},
        batch=grown["rows"] / max(grown["executions"], 1),
        cpu_ms=cpu_s / requests * 1e3,
    )


def read_statistics(url: str, model: str) -> dict[str, int]:
    """Read nanoseconds by stage of all requests so far, and the numbers of requests, rows and executions.

    Source: Triton's statistics extension.
    """
    with urllib.request.urlopen(f"{url}/v2/models/{model}/stats", timeout=30) as response:
        found = json.load(response)["model_stats"][0]
    stages = {stage: found["inference_stats"][stage]["ns"] for stage in _STAGES}
    return {
        **stages,
        "requests": found["inference_stats"]["success"]["count"],
        "rows": found["inference_count"],
        "executions": found["execution_count"],
    }


def _cpu_seconds(pid: int) -> float:
    supervisor = psutil.Process(pid)
    times = [process.cpu_times() for process in (supervisor, *supervisor.children(recursive=True))]
    return float(sum(time.user + time.system for time in times))


def _bare_run(variant: Variant, concurrency: int) -> Run:
    """Run sessions with the same threads, and as many callers as busy instances."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = variant.threads
    graph = str(exported_graph(variant.architecture))
    session = onnxruntime.InferenceSession(graph, options, providers=["CPUExecutionProvider"])
    image = np.random.default_rng(0).normal(size=(1, 3, 224, 224)).astype(np.float32)
    feeds = {session.get_inputs()[0].name: image}
    callers = min(variant.instances, concurrency)

    def run(seconds: float) -> Sample:
        found = measure_throughput(lambda: session.run(None, feeds), callers, seconds)
        p50, p99 = (float(value) for value in np.percentile(found.latencies_ms, (50, 99)))
        load = Load(per_second=found.per_second, p50_ms=p50, p99_ms=p99)
        return Sample(load=load, server_us={}, batch=1.0, cpu_ms=0.0)

    return run


def rows_of(title: str, generator: str, samples: Mapping[str, Sequence[Sample]]) -> list[dict[str, object]]:
    """Make a row per server; ratios are to the last one, round by round."""
    rates = {name: [sample.load.per_second for sample in found] for name, found in samples.items()}
    reference = list(rates.values())[-1]
    rows: list[dict[str, object]] = []
    for name, found in samples.items():
        ratio = ratio_of(rates[name], reference)
        stages = {
            f"{stage.removeprefix('compute_')} us": round(
                statistics.median(sample.server_us.get(stage, 0.0) for sample in found)
            )
            for stage in _STAGES
        }
        rows.append(
            {
                "model": title,
                "set-up": name,
                "requests/s": round(statistics.median(rates[name]), 1),
                "ratio": ratio.median,
                "spread": ratio.spread,
                "p50 ms": round(statistics.median(sample.load.p50_ms for sample in found), 2),
                "p99 ms": round(statistics.median(sample.load.p99_ms for sample in found), 2),
                **stages,
                "batch": round(statistics.median(sample.batch for sample in found), 2),
                "CPU ms": round(statistics.median(sample.cpu_ms for sample in found), 2),
                "load by": generator if found[0].server_us else "in process",
            }
        )
    return rows
