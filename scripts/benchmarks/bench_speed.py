"""Whether `graphkiln bench` measures what perf_analyzer does, on a graph that costs next to nothing."""

from __future__ import annotations

import statistics
import tempfile
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

from client_speed import write_mean_graph
from generators import PERF_ANALYZER, Bench, Generator, Load, PerfAnalyzer, find_generator
from measurement import ratio_of, show_progress
from stores import add_model

from graphkiln.story.server import start_server

_MODEL, _ELEMENTS = "mean", 256
_CONCURRENCIES = (1, 8)


def benchmark_bench(rounds: int, seconds: float) -> list[dict[str, object]]:
    """Both generators in turn, over HTTP and gRPC; perf_analyzer only where it is on PATH."""
    generators: list[Generator] = [Bench()]
    if find_generator().name == PERF_ANALYZER:
        generators.append(PerfAnalyzer())
    rows: list[dict[str, object]] = []
    with tempfile.TemporaryDirectory() as folder:
        graph, store = Path(folder) / "mean.onnx", Path(folder) / "store"
        write_mean_graph(graph, _ELEMENTS)
        add_model(store, _MODEL, graph)
        with start_server(store) as server:
            for protocol, url in zip(("HTTP", "gRPC"), server.urls, strict=True):
                for concurrency in _CONCURRENCIES:
                    loads: defaultdict[str, list[Load]] = defaultdict(list)
                    for number in range(rounds):
                        for generator in generators:
                            show_progress(f"{protocol}, {concurrency}, round {number + 1}/{rounds}: {generator.name}")
                            loads[generator.name].append(generator(url, _MODEL, concurrency, seconds))
                    rows += rows_of(f"1 kB, {protocol}, {concurrency}", loads)
    show_progress("")
    return rows


def rows_of(title: str, loads: Mapping[str, Sequence[Load]]) -> list[dict[str, object]]:
    """A row for each generator; the ratio is of the median latencies to perf_analyzer's, round by round.

    Without perf_analyzer there is none: nothing was compared.
    """
    reference = [load.p50_ms for load in loads.get(PERF_ANALYZER, ())]
    rows: list[dict[str, object]] = []
    for name, found in loads.items():
        ratio = ratio_of([load.p50_ms for load in found], reference) if reference else None
        rows.append(
            {
                "model": title,
                "set-up": name,
                "p50 ms": round(statistics.median(load.p50_ms for load in found), 3),
                "ratio": ratio.median if ratio else "-",
                "spread": ratio.spread if ratio else "-",
                "p99 ms": round(statistics.median(load.p99_ms for load in found), 2),
                "requests/s": round(statistics.median(load.per_second for load in found), 1),
            }
        )
    return rows
