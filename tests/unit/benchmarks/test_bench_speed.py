"""Two load generators beside each other."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import bench_speed
import pytest
from bench_speed import benchmark_bench, rows_of
from generators import Bench, Load, PerfAnalyzer


def load(p50_ms: float) -> Load:
    return Load(per_second=1e3 / p50_ms, p50_ms=p50_ms, p99_ms=2 * p50_ms)


def test_ratios_are_of_latencies_to_perf_analyzers() -> None:
    rows = rows_of("t", {"ours": [load(1.1), load(1.0), load(1.3)], "perf_analyzer": [load(1.0)] * 3})
    assert [(row["set-up"], row["ratio"]) for row in rows] == [("ours", 1.1), ("perf_analyzer", 1.0)]
    assert rows[0]["p50 ms"] == 1.1


def test_without_perf_analyzer_nothing_is_said_of_how_far_it_is() -> None:
    (row,) = rows_of("t", {"ours": [load(1.1), load(1.3)]})
    assert (row["ratio"], row["spread"], row["p50 ms"]) == ("-", "-", 1.2)


@pytest.mark.parametrize("both", [True, False])
def test_generators_take_turns(monkeypatch: pytest.MonkeyPatch, both: bool) -> None:
    calls: list[tuple[str, str, int, float]] = []

    def measure(self: Bench | PerfAnalyzer, url: str, model: str, concurrency: int, seconds: float) -> Load:
        assert model == "mean"
        calls.append((self.name, url, concurrency, seconds))
        return load(1.0)

    def start(store: Path) -> nullcontext[SimpleNamespace]:
        assert (store / "mean" / "config.pbtxt").is_file()
        return nullcontext(SimpleNamespace(urls=("http://h", "grpc://h")))

    for kind in (Bench, PerfAnalyzer):
        monkeypatch.setattr(kind, "__call__", measure)
    monkeypatch.setattr(bench_speed, "find_generator", PerfAnalyzer if both else Bench)
    monkeypatch.setattr(bench_speed, "start_server", start)
    rows = benchmark_bench(2, 0.5)
    assert len(rows) == (8 if both else 4)
    names = ["graphkiln bench", "perf_analyzer"] if both else ["graphkiln bench"]
    assert [name for name, *_ in calls[:4]] == (names * 4)[:4]
    assert {call[1:] for call in calls} == {(url, n, 0.5) for url in ("http://h", "grpc://h") for n in (1, 8)}
