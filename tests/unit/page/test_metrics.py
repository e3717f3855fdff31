"""Metrics as the charts take them."""

from __future__ import annotations

from pathlib import Path

import pytest
from shown_server import METRICS

from graphkiln.page.server import parse_metrics, placements, read_metrics, traffic
from graphkiln_backend.graph.errors import ConnectionFailed

TEXT = METRICS.read_text()


def test_labels_are_unescaped() -> None:
    assert {sample.labels.get("model") for sample in parse_metrics(TEXT)} == {"m", 'other "one"\\', None}


def test_traffic_by_version() -> None:
    row, other = traffic(parse_metrics(TEXT))
    assert row == {
        "model": "m", "version": "1", "answered": 40, "failed": 4, "samples": 80, "batches": 20, "request_us": 120000,
        "queue_us": 40000, "waiting": 3, "p50_us": 900, "p99_us": 4000, "sizes": {"1": 7, "+Inf": 12},
    }  # fmt: skip
    assert other == {"model": 'other "one"\\', "version": "2", "answered": 2, "sizes": {}}, "NaN is no latency"


def test_placements_tell_the_worst_of_the_instances() -> None:
    assert placements(parse_metrics(TEXT)) == {
        ("m", "1"): {
            "instances": 2, "engine": "onnxruntime", "device": "cpu", "precision": "fp32", "self_test_error": 3e-07,
            "self_test_at_s": 100,
        }
    }  # fmt: skip


def test_nobody_answers(tmp_path: Path) -> None:
    with pytest.raises(ConnectionFailed, match="metrics cannot be read"):
        read_metrics((tmp_path / "nothing").as_uri())
