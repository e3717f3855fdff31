"""Metrics of a run in a fake registry."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from score_events import RUN, committed

from graphkiln.scoring.metrics import COUNTERS, GAUGES, RunMetrics
from graphkiln_backend.scoring.messages import NodeLost, UnitFailed


class FakeRegistry:
    def __init__(self) -> None:
        self.counts: Counter[tuple[str, ...]] = Counter()
        self.gauges: dict[str, float] = {}
        self.units: list[float] = []

    def count(self, name: str, value: float, tags: Mapping[str, str]) -> None:
        assert tuple(tags) == COUNTERS[name][1]
        self.counts[(name.removeprefix("graphkiln_score_"), *tags.values())] += value  # type: ignore[assignment]

    def show(self, name: str, value: float) -> None:
        assert name in GAUGES
        self.gauges[name.removeprefix("graphkiln_score_")] = value

    def measure_unit(self, seconds: float, tags: Mapping[str, str]) -> None:
        assert tuple(tags) == ("node",)
        self.units.append(seconds)


def test_metrics_of_a_run() -> None:
    registry = FakeRegistry()
    metrics = RunMetrics(lambda: registry)
    for event in RUN:
        metrics.observe(event)
    metrics.observe(committed("c"))
    counts = registry.counts
    assert sum(value for name, value in counts.items() if name[0] == "rows_total" and name[2] == "scored") == 297
    assert sum(value for name, value in counts.items() if name[0] == "rows_total" and name[2] == "error") == 2
    assert sum(value for name, value in counts.items() if name[0] == "rows_total" and name[2] == "quarantined") == 1
    assert sum(value for name, value in counts.items() if name[:1] == ("units_total",) and name[2] == "committed") == 3
    assert counts["units_total", "", "retried"] == 1
    assert counts["units_total", "", "twin"] == 1
    assert counts["workers_ended_total", "node-1", "ended"] == 1
    assert counts["stage_seconds_total", "node-1", "compute"] == 5
    assert registry.gauges == {"units_left": 3, "rows_left": 300, "workers": 1}
    assert len(registry.units) == 3


def test_failures_are_counted() -> None:
    registry = FakeRegistry()
    metrics = RunMetrics(lambda: registry)
    metrics.observe(UnitFailed(unit_id="a", path="p", reason="r"))
    metrics.observe(NodeLost(node="n"))
    assert registry.counts == {("units_total", "", "failed"): 1, ("nodes_lost_total", "n"): 1}


def test_metrics_wait_for_ray() -> None:
    registry, is_running = FakeRegistry(), False
    metrics = RunMetrics(lambda: registry if is_running else None)
    metrics.observe(RUN[0])
    assert registry.gauges == {}
    is_running = True
    metrics.observe(RUN[1])
    assert registry.gauges["rows_left"] == 600
