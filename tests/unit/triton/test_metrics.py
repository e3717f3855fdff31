"""graphkiln's metrics, on a metrics registry like Triton's."""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Iterator
from pathlib import Path

import pytest
from fake_triton import MetricFamily, metric
from statuses import instance_status

from graphkiln_backend.graph.errors import GraphkilnError
from graphkiln_backend.triton import metrics as module
from graphkiln_backend.triton.metric_catalog import METRICS
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
def test_what_the_instance_serves_with() -> None:
    assert metric("graphkiln_instance_info", engine="e", device="cpu", precision="fp32") == 1
    assert metric("graphkiln_load_seconds") == 1.5
    assert metric("graphkiln_warmup_seconds") == 0.25
    assert metric("graphkiln_self_test_error") == 2e-6
    assert metric("graphkiln_shared_memory_bytes") == 1 << 20
    assert metric("graphkiln_fallbacks_total") == 2


@pytest.mark.usefixtures("metrics")
def test_what_really_ran_by_executor_and_precision() -> None:
    assert metric("graphkiln_nodes", executor="CPUExecutionProvider") == 10
    assert metric("graphkiln_nodes", executor="CUDAExecutionProvider") == 2
    assert metric("graphkiln_products", precision="fp32") == 3
    assert metric("graphkiln_products", precision="bf16") == 4


@pytest.mark.usefixtures("metrics")
def test_every_metric_names_model_version_and_instance() -> None:
    of_servers = {metric.name for metric in METRICS if metric.of_server}
    for labels in [labels for name, labels in MetricFamily.published if name not in of_servers]:
        assert {("model", "m"), ("version", "3"), ("instance", "m_0")} <= labels


@pytest.mark.usefixtures("metrics")
def test_what_only_grows_is_a_counter() -> None:
    counters = {name for name, kind in MetricFamily.kinds.items() if kind == MetricFamily.COUNTER}
    histogram = {f"graphkiln_batch_size_{part}" for part in ("bucket", "sum", "count")}
    replays = {f"graphkiln_self_test_{part}_total" for part in ("replays", "failures")}
    assert counters == {"graphkiln_failed_requests_total", "graphkiln_fallbacks_total", *histogram, *replays}


def test_batches_are_a_cumulative_histogram(metrics: InstanceMetrics, batch_sizes: deque[int]) -> None:
    batch_sizes.extend([1, 3, 3, 128, 200])
    metrics.close()
    assert buckets() == [1, 1, 3, 3, 3, 3, 3, 4, 5]
    assert metric("graphkiln_batch_size_sum") == 335
    assert metric("graphkiln_batch_size_count") == 5
    assert not batch_sizes


def test_a_batch_of_no_rows_is_in_every_bucket(metrics: InstanceMetrics, batch_sizes: deque[int]) -> None:
    batch_sizes.append(0)
    metrics.close()
    assert buckets() == [1] * len(BOUNDS)
    assert metric("graphkiln_batch_size_sum") == 0


def test_failed_requests_are_counted_once_by_their_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_PUBLISH_EVERY_S", 0.001)
    failed = Counter[str]()
    with InstanceMetrics("m_0", STATUS, 0, deque(), failed) as metrics:
        assert metric("graphkiln_failed_requests_total", code="INTERNAL") == 0, "rates need a beginning"
        for count in (3, 5):
            failed["INTERNAL"], deadline = count, time.monotonic() + 20
            while metric("graphkiln_failed_requests_total", code="INTERNAL") < count:
                assert time.monotonic() < deadline
                time.sleep(0.001)
        failed["CANCELLED"] += 1
        metrics.close()
        assert metric("graphkiln_failed_requests_total", code="INTERNAL") == 5
        assert metric("graphkiln_failed_requests_total", code="CANCELLED") == 1


def test_what_decodes_for_another_model_tells_its_images_and_its_failures() -> None:
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


def test_what_has_decoded_nothing_yet_says_so() -> None:
    """Rates need a beginning."""
    with ImageMetrics("m.images_0", "m.images", "3", {}, deque()) as metrics:
        metrics.close()
        assert metric("graphkiln_decoded_images_total") == metric("graphkiln_decode_seconds_total") == 0


def test_every_code_of_the_tree_of_errors_is_counted() -> None:
    kinds = [GraphkilnError]
    for kind in kinds:
        kinds += kind.__subclasses__()
    assert {kind.triton_code for kind in kinds} <= set(module._CODES)


def test_no_batch_publishes_nothing(metrics: InstanceMetrics) -> None:
    metrics.close()
    assert buckets() == [0] * len(BOUNDS)


def test_batches_are_published_while_the_instance_serves(
    monkeypatch: pytest.MonkeyPatch, batch_sizes: deque[int]
) -> None:
    monkeypatch.setattr(module, "_PUBLISH_EVERY_S", 0.001)
    with InstanceMetrics("m_0", STATUS, 0, batch_sizes, {}):
        for count in (1, 2):
            batch_sizes.append(4)
            deadline = time.monotonic() + 20
            while metric("graphkiln_batch_size_count") < count:
                assert time.monotonic() < deadline
                time.sleep(0.001)
        assert metric("graphkiln_batch_size_sum") == 8


def test_nothing_is_lost_or_counted_twice_under_load(monkeypatch: pytest.MonkeyPatch, batch_sizes: deque[int]) -> None:
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


def test_metrics_vanish_with_the_instance(batch_sizes: deque[int]) -> None:
    metrics = InstanceMetrics("m_0", STATUS, 0, batch_sizes, {})
    metrics.close()
    assert MetricFamily.published
    del metrics
    assert not MetricFamily.published


def test_replays_are_counted_and_the_last_good_one_is_dated(metrics: InstanceMetrics) -> None:
    assert metric("graphkiln_self_test_timestamp_seconds") == 0  # of a version without golden samples
    before = time.time()
    metrics.count_replay(passed=True)
    assert before <= metric("graphkiln_self_test_timestamp_seconds") <= time.time()
    dated = metric("graphkiln_self_test_timestamp_seconds")
    metrics.count_replay(passed=False)
    assert metric("graphkiln_self_test_replays_total") == 2
    assert metric("graphkiln_self_test_failures_total") == 1
    assert metric("graphkiln_self_test_timestamp_seconds") == dated


def test_restarts_are_published_once_over_all_instances(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, batch_sizes: deque[int]
) -> None:
    monkeypatch.setattr(module, "_PUBLISH_EVERY_S", 0.001)
    monkeypatch.setenv("GRAPHKILN_RUN_FOLDER", str(tmp_path))
    (tmp_path / "restarts.json").write_text('{"instance_died": 3}')
    with InstanceMetrics("m_0", STATUS, 0, batch_sizes, {}), InstanceMetrics("m_1", STATUS, 0, deque(), {}):
        deadline = time.monotonic() + 20
        while "graphkiln_restarts_total" not in MetricFamily.names():
            assert time.monotonic() < deadline
        time.sleep(0.02)
        assert metric("graphkiln_restarts_total", cause="instance_died") == 3
