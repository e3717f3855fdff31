"""The metrics of a running server for the page's charts: counters by model version, never reset here.

A rate is the difference of two readings. The browser makes it, so that the page keeps no state.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from graphkiln_backend.graph.errors import ConnectionFailed
from graphkiln_backend.server.ports import fetch_metrics

_SAMPLE = re.compile(r"^([a-zA-Z_:][\w:]*)(?:\{(.*)\})? (\S+)", re.MULTILINE)
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
_ESCAPED = re.compile(r"\\(.)")
_COUNTERS = {
    "nv_inference_request_success": "answered",
    "nv_inference_request_failure": "failed",
    "graphkiln_failed_requests_total": "failed",
    "nv_inference_count": "samples",
    "nv_inference_exec_count": "batches",
    "nv_inference_request_duration_us": "request_us",
    "nv_inference_queue_duration_us": "queue_us",
    "nv_inference_pending_request_count": "waiting",
}
_QUANTILES = {"0.5": "p50_us", "0.99": "p99_us"}
_SUMMARY = "nv_inference_request_summary_us"
_BATCHES = "graphkiln_batch_size_bucket"
_GIVEN_UP = {"CANCELED", "CANCELLED"}  # as Triton and instances call requests whose clients hung up
_INFO = "graphkiln_instance_info"
_FACTS = {
    "graphkiln_self_test_error": "self_test_error",
    "graphkiln_self_test_timestamp_seconds": "self_test_at_s",
    "graphkiln_self_test_failures_total": "self_test_failures",
    "graphkiln_self_test_replays_total": "self_test_replays",
    "graphkiln_load_seconds": "load_s",
}


@dataclass(frozen=True, slots=True)
class Sample:
    """One line of Prometheus' text format.

    Attributes:
        name: Of the metric.
        labels: By name.
        value: May be NaN.
    """

    name: str
    labels: Mapping[str, str]
    value: float


def parse_metrics(text: str) -> Iterator[Sample]:
    """The samples of a text. Source: Prometheus, "Exposition formats", text format 0.0.4."""
    for name, labels, value in _SAMPLE.findall(text):
        found = {key: _ESCAPED.sub(_unescaped, escaped) for key, escaped in _LABEL.findall(labels)}
        try:
            yield Sample(name, found, float(value))
        except ValueError:
            continue


def read_metrics(url: str) -> str:
    """The text that a server publishes.

    Raises:
        ConnectionFailed: There is no server, or the response is no metrics.
    """
    try:
        return fetch_metrics(url)
    except (OSError, ValueError) as error:
        raise ConnectionFailed(f"the metrics cannot be read: {error}", hint="is the server running?") from error


def traffic(samples: Iterator[Sample]) -> list[dict[str, Any]]:
    """Counters of each version since it was loaded, by name and version.

    Returns:
        Rows of `model`, `version`, the counters (durations in microseconds, `failed` without clients that cancelled;
        of `answered`, those too that an instance answered with an error, which are among `failed`),
        `p50_us` and `p99_us` where the server has them, and `sizes`: how many batches had at most so many rows.
    """
    rows: dict[tuple[str, str], dict[str, Any]] = defaultdict(lambda: {"sizes": defaultdict(float)})
    for sample in samples:
        key = sample.labels.get("model", ""), sample.labels.get("version", "")
        if name := _name_of(sample):
            rows[key][name] = rows[key].get(name, 0.0) + sample.value
        elif sample.name == _BATCHES:
            rows[key]["sizes"][sample.labels.get("le", "")] += sample.value
    return [{"model": model, "version": version, **rows[model, version]} for model, version in sorted(rows)]


def placements(samples: Iterator[Sample]) -> dict[tuple[str, str], dict[str, Any]]:
    """Engine, device and precision of each version, and its self-tests: the worst of its instances."""
    facts: dict[tuple[str, str], dict[str, Any]] = defaultdict(lambda: {"instances": 0})
    for sample in samples:
        row = facts[sample.labels.get("model", ""), sample.labels.get("version", "")]
        if sample.name == _INFO:
            row |= {key: sample.labels.get(key, "") for key in ("engine", "device", "precision")}
            row["instances"] += 1
        elif name := _FACTS.get(sample.name):
            worst = min if name == "self_test_at_s" else max
            row[name] = worst(row.get(name, sample.value), sample.value)
    return {key: row for key, row in facts.items() if row["instances"]}


def _name_of(sample: Sample) -> str:
    """Key of a sample in a row of `traffic`; empty for one that is not part of it."""
    if math.isnan(sample.value) or {sample.labels.get("reason"), sample.labels.get("code")} & _GIVEN_UP:
        return ""
    if sample.name == _SUMMARY:
        return _QUANTILES.get(sample.labels.get("quantile", ""), "")
    return _COUNTERS.get(sample.name, "")


def _unescaped(match: re.Match[str]) -> str:
    return "\n" if match[1] == "n" else match[1]
