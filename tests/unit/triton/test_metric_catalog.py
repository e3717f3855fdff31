"""The catalog of metrics is that of what an instance publishes."""

from __future__ import annotations

import time
from collections import deque
from pathlib import Path

import pytest
from fake_triton import MetricFamily
from statuses import instance_status

from graphkiln_backend.triton.metric_catalog import METRICS, describe
from graphkiln_backend.triton.metrics import ImageMetrics, InstanceMetrics

STATUS = instance_status(nodes={"CPUExecutionProvider": 1}, products={"fp32": 1})


def test_it_names_what_is_published_with_its_labels(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("GRAPHKILN_RUN_FOLDER", str(tmp_path))
    (tmp_path / "restarts.json").write_text('{"instance_died": 3}')
    labels = ("m.images_0", "m.images", "3")
    with InstanceMetrics("m_0", STATUS, 0, deque(), {}), ImageMetrics(*labels, {}, deque()):
        deadline = time.monotonic() + 20
        while "graphkiln_restarts_total" not in MetricFamily.names():  # published by a thread
            assert time.monotonic() < deadline
            time.sleep(0.001)
        found = published()
    common = {"model", "version"}
    assert found == {each.name: {*each.labels, *(() if each.of_server else common)} for each in METRICS}


def published() -> dict[str, set[str]]:
    """The labels of each metric by its name; of a histogram, those of its buckets."""
    found: dict[str, set[str]] = {}
    with MetricFamily.lock:
        for name, labels in MetricFamily.published:
            if not name.endswith(("size_sum", "size_count")):
                found.setdefault(name.removesuffix("_bucket"), set()).update(key for key, _ in labels)
    return found


def test_what_nobody_described_is_an_error() -> None:
    assert describe("graphkiln_batch_size") == "rows of each run"
    with pytest.raises(KeyError):
        describe("graphkiln_unknown")
