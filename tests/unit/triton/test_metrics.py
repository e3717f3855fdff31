"""graphkiln's own metrics, in a fake of Triton's registry."""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from fake_triton import MetricFamily, TritonError, metric
from statuses import instance_status

from graphkiln_backend.graph.errors import GraphkilnError
from graphkiln_backend.triton import metrics as module
from graphkiln_backend.triton.metric_catalog import METRICS, describe
from graphkiln_backend.triton.metrics import ImageMetrics, InstanceMetrics

STATUS = instance_status(
    nodes={"CPUExecutionProvider": 10, "CUDAExecutionProvider": 2},
    products={"fp32": 3, "bf16": 4},
    load_ms=1500.0,
    warmup_ms=250.0,
    self_test_error=2e-6,
    fallbacks=2,
)
BOUNDS = ("1", "2", "4", "8", "16", "32", "64", "128", "+Inf")


@pytest.fixture
def batch_sizes() -> deque[int]:
    return deque()


@pytest.fixture
def metrics(batch_sizes: deque[int]) -> Iterator[InstanceMetrics]:
    with InstanceMetrics("m_0", STATUS, 1 << 20, batch_sizes, {}) as metrics:
        yield metrics


def buckets() -> list[float]:
    return [metric("graphkiln_batch_size_bucket", le=bound) for bound in BOUNDS]


@pytest.mark.usefixtures("metrics")
def test_instance_metrics() -> None:
    assert metric("graphkiln_instance_info", engine="e", device="cpu", precision="fp32") == 1
    assert metric("graphkiln_load_seconds") == 1.5
    assert metric("graphkiln_warmup_seconds") == 0.25
    assert metric("graphkiln_self_test_error") == 2e-6
    assert metric("graphkiln_shared_memory_bytes") == 1 << 20
    assert metric("graphkiln_fallbacks_total") == 2
    assert metric("graphkiln_nodes", executor="CUDAExecutionProvider") == 2
    assert metric("graphkiln_products", precision="bf16") == 4


@pytest.mark.usefixtures("metrics")
def test_labels_of_all_metrics() -> None:
    for _, labels in MetricFamily.published:  # Triton crashes if instances that share a metric end together
        assert {("model", "m"), ("version", "3"), ("instance", "m_0")} <= labels


@pytest.mark.usefixtures("metrics")
def test_counters() -> None:
    counters = {name for name, kind in MetricFamily.kinds.items() if kind == MetricFamily.COUNTER}
    histogram = {f"graphkiln_batch_size_{part}" for part in ("bucket", "sum", "count")}
    replays = {f"graphkiln_self_test_{part}_total" for part in ("replays", "failures")}
    assert counters == {"graphkiln_failed_requests_total", "graphkiln_fallbacks_total", *histogram, *replays}


def test_batch_sizes_are_a_cumulative_histogram(metrics: InstanceMetrics, batch_sizes: deque[int]) -> None:
    batch_sizes.extend([1, 3, 3, 128, 200])
    metrics.close()
    assert buckets() == [1, 1, 3, 3, 3, 3, 3, 4, 5]
    assert metric("graphkiln_batch_size_sum") == 335
    assert metric("graphkiln_batch_size_count") == 5
    assert not batch_sizes


def test_failed_requests_by_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_PUBLISH_EVERY_S", 0.001)
    failed = Counter[str]()
    with InstanceMetrics("m_0", STATUS, 0, deque(), failed) as metrics:
        assert metric("graphkiln_failed_requests_total", code="INTERNAL") == 0, "rates need a first value"
        for count in (3, 5):
            failed["INTERNAL"], deadline = count, time.monotonic() + 20
            while metric("graphkiln_failed_requests_total", code="INTERNAL") < count:
                assert time.monotonic() < deadline
                time.sleep(0.001)
        failed["CANCELLED"] += 1
        metrics.close()
        assert metric("graphkiln_failed_requests_total", code="INTERNAL") == 5
        assert metric("graphkiln_failed_requests_total", code="CANCELLED") == 1


def test_image_metrics() -> None:
    seconds = deque([0.25, 0.5, 0.25])
    with ImageMetrics("m.images_0", "m.images", "3", {"INVALID_ARG": 2}, seconds) as metrics:
        metrics.close()
        decoded = {"graphkiln_decoded_images_total", "graphkiln_decode_seconds_total"}
        assert MetricFamily.names() == {"graphkiln_failed_requests_total", *decoded}
        failed = {code: metric("graphkiln_failed_requests_total", code=code) for code in module._CODES}
        assert failed == {**dict.fromkeys(module._CODES, 0), "INVALID_ARG": 2}
        assert metric("graphkiln_decoded_images_total", model="m.images", version="3", instance="m.images_0") == 3
        assert metric("graphkiln_decode_seconds_total") == 1
        assert MetricFamily.kinds["graphkiln_decode_seconds_total"] == MetricFamily.COUNTER
        assert not seconds


def test_codes_of_all_error_classes() -> None:
    kinds = [GraphkilnError]
    for kind in kinds:
        kinds += kind.__subclasses__()
    assert {kind.triton_code for kind in kinds} <= set(module._CODES)
    assert all(hasattr(TritonError, code) for code in module._CODES)


def test_no_batch_is_lost_or_counted_twice(monkeypatch: pytest.MonkeyPatch, batch_sizes: deque[int]) -> None:
    monkeypatch.setattr(module, "_PUBLISH_EVERY_S", 0)
    with InstanceMetrics("m_0", STATUS, 0, batch_sizes, {}) as metrics:
        for number in range(5000):
            batch_sizes.append(number % 7)
        metrics.close()
        assert metric("graphkiln_batch_size_count") == 5000
        assert metric("graphkiln_batch_size_sum") == sum(number % 7 for number in range(5000))


def test_no_thread_outlives_the_instance(batch_sizes: deque[int]) -> None:
    before = set(threading.enumerate())
    with InstanceMetrics("m_0", STATUS, 0, batch_sizes, {}):
        assert len(set(threading.enumerate()) - before) == 1
    assert set(threading.enumerate()) == before


def test_metrics_are_dropped_with_the_instance(batch_sizes: deque[int]) -> None:
    metrics = InstanceMetrics("m_0", STATUS, 0, batch_sizes, {})
    metrics.close()
    assert MetricFamily.published
    del metrics
    assert not MetricFamily.published


def test_replays_and_time_of_the_last_pass(metrics: InstanceMetrics) -> None:
    assert metric("graphkiln_self_test_timestamp_seconds") == 0  # of a version without golden samples
    before = time.time()
    metrics.count_replay(passed=True)
    assert before <= metric("graphkiln_self_test_timestamp_seconds") <= time.time()
    dated = metric("graphkiln_self_test_timestamp_seconds")
    metrics.count_replay(passed=False)
    assert metric("graphkiln_self_test_replays_total") == 2
    assert metric("graphkiln_self_test_failures_total") == 1
    assert metric("graphkiln_self_test_timestamp_seconds") == dated


# The catalog of metrics.

MINIMAL_STATUS = instance_status(nodes={"CPUExecutionProvider": 1}, products={"fp32": 1})


def test_catalog_matches_published_metrics() -> None:
    labels = ("m.images_0", "m.images", "3")
    recorder: Any = SimpleNamespace(recorded=5, dropped=2)
    instance = InstanceMetrics("m_0", MINIMAL_STATUS, 0, deque(), {}, recorder=recorder)
    with instance, ImageMetrics(*labels, {}, deque()):
        found = published()
        instance.close()
        assert (metric("graphkiln_recorded_requests_total"), metric("graphkiln_record_dropped_total")) == (5, 2)
    of_instances = [each for each in METRICS if "instance" in each.labels]  # the supervisor publishes the others
    assert found == {each.name: {"model", "version", *each.labels} for each in of_instances}


def published() -> dict[str, set[str]]:
    """The labels of each metric by its name; of a histogram, those of its buckets."""
    found: dict[str, set[str]] = {}
    with MetricFamily.lock:
        for name, labels in MetricFamily.published:
            if not name.endswith(("size_sum", "size_count")):
                found.setdefault(name.removesuffix("_bucket"), set()).update(key for key, _ in labels)
    return found


def test_unknown_metric_has_no_description() -> None:
    assert describe("graphkiln_batch_size") == "rows of each run"
    with pytest.raises(KeyError):
        describe("graphkiln_unknown")
