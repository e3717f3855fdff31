"""Prometheus metrics of a run, exported by every node of the cluster with Ray's own metrics.

Ray adds the prefix `ray_`. Metrics are counted by the driver, so that no figures are lost with a worker.
Source: Ray's documentation, "Collecting and monitoring metrics" and `ray.util.metrics`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import fields

from graphkiln_backend.scoring.messages import (
    Event,
    NodeLost,
    RunPlanned,
    UnitCommitted,
    UnitFailed,
    UnitRetried,
    WorkerEnded,
    WorkerReady,
)

COUNTERS: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "graphkiln_score_rows_total": (
        "Rows with an answer (scored), with an error, or that ended a worker (quarantined).",
        ("node", "outcome"),
    ),
    "graphkiln_score_units_total": (
        "Units that were committed, of these twins, failed attempts (retried) and failed units.",
        ("node", "outcome"),
    ),
    "graphkiln_score_stage_seconds_total": (
        "Seconds per stage, summed over workers; stages overlap.",
        ("node", "stage"),
    ),
    "graphkiln_score_workers_ended_total": ("Workers that ended and were replaced.", ("node", "cause")),
    "graphkiln_score_nodes_lost_total": ("Nodes that went away.", ("node",)),
}
GAUGES: Mapping[str, str] = {
    "graphkiln_score_units_left": "Units without a result.",
    "graphkiln_score_rows_left": "Rows without an answer.",
    "graphkiln_score_workers": "Workers that are ready.",
}
UNIT_SECONDS = "graphkiln_score_unit_seconds"
_BOUNDARIES = [0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1000.0]
_NO_NODE = ""


class RayRegistry:
    """Metrics in Ray; created after Ray is initialized."""

    def __init__(self) -> None:
        from ray.util.metrics import Counter, Gauge, Histogram

        self._counters = {name: Counter(name, text, tags) for name, (text, tags) in COUNTERS.items()}
        self._gauges = {name: Gauge(name, text) for name, text in GAUGES.items()}
        self._histogram = Histogram(UNIT_SECONDS, "From reading a unit to its commit.", _BOUNDARIES, ("node",))

    def count(self, name: str, value: float, tags: Mapping[str, str]) -> None:
        """Add to a counter; Ray refuses 0."""
        if value > 0:
            self._counters[name].inc(value, dict(tags))

    def show(self, name: str, value: float) -> None:
        """Set a gauge."""
        self._gauges[name].set(value)

    def measure_unit(self, seconds: float, tags: Mapping[str, str]) -> None:
        """Add to the histogram."""
        self._histogram.observe(seconds, dict(tags))


def ray_registry() -> RayRegistry | None:
    """Create the metrics if this process is connected to Ray, which a run on this machine alone does not import."""
    ray = sys.modules.get("ray")
    return RayRegistry() if ray and ray.is_initialized() else None


class RunMetrics:
    """Counts the events of a run.

    Args:
        open_registry: Creates the registry, or returns None if Ray is not initialized yet.
    """

    def __init__(self, open_registry: Callable[[], RayRegistry | None] = ray_registry) -> None:
        self._open = open_registry
        self._registry: RayRegistry | None = None
        self._units_left = self._rows_left = 0
        self._nodes: dict[str, str] = {}

    def observe(self, event: Event) -> None:
        """Count an event."""
        self._registry = self._registry or self._open()
        match event:
            case RunPlanned():
                self._units_left, self._rows_left = event.units - event.done_units, event.rows - event.done_rows
            case WorkerReady():
                self._nodes[event.worker] = event.facts.node
            case WorkerEnded():
                self._nodes.pop(event.worker, None)
                cause = "unfit" if event.unfit else "ended"
                self._count("graphkiln_score_workers_ended_total", 1, node=event.node, cause=cause)
            case NodeLost():
                self._count("graphkiln_score_nodes_lost_total", 1, node=event.node)
            case UnitRetried() | UnitFailed():
                outcome = "retried" if isinstance(event, UnitRetried) else "failed"
                self._count("graphkiln_score_units_total", 1, node=_NO_NODE, outcome=outcome)
            case UnitCommitted():
                self._count_unit(event)
        if self._registry:
            self._registry.show("graphkiln_score_units_left", self._units_left)
            self._registry.show("graphkiln_score_rows_left", self._rows_left)
            self._registry.show("graphkiln_score_workers", len(self._nodes))

    def _count_unit(self, event: UnitCommitted) -> None:
        report, node = event.report, self._nodes.get(event.worker, _NO_NODE)
        self._count("graphkiln_score_units_total", 1, node=node, outcome="committed")
        self._count("graphkiln_score_units_total", int(report.twin), node=node, outcome="twin")
        for field in fields(report.times):
            seconds = getattr(report.times, field.name)
            self._count("graphkiln_score_stage_seconds_total", seconds, node=node, stage=field.name.removesuffix("_s"))
        if self._registry:
            self._registry.measure_unit(report.seconds, {"node": node})
        self._units_left, self._rows_left = self._units_left - 1, self._rows_left - report.rows
        quarantined = len(report.quarantined)
        rows = {"scored": report.rows - report.errors, "error": report.errors - quarantined, "quarantined": quarantined}
        for outcome, count in rows.items():
            self._count("graphkiln_score_rows_total", count, node=node, outcome=outcome)

    def _count(self, name: str, value: float, **tags: str) -> None:
        if self._registry:
            self._registry.count(name, value, tags)
