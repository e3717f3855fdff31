"""graphkiln's own metrics."""

from __future__ import annotations

import os
import threading
import time
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fake_triton import TritonError, labels_of, value_of
from statuses import instance_status
from waiting import wait_until

from graphkiln_backend.graph.errors import GraphkilnError
from graphkiln_backend.triton import metrics as module
from graphkiln_backend.triton.environment import RUN_FOLDER_VARIABLE
from graphkiln_backend.triton.metric_catalog import METRICS, describe, family_of, sample_line
from graphkiln_backend.triton.metrics import ImageMetrics, InstanceMetrics, read_metrics

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


def test_instance_metrics(metrics: InstanceMetrics) -> None:
    lines = [*metrics.lines()]
    assert value_of(lines, "graphkiln_instance_info", engine="e", device="cpu", precision="fp32") == 1
    assert value_of(lines, "graphkiln_load_seconds") == 1.5
    assert value_of(lines, "graphkiln_warmup_seconds") == 0.25
    assert value_of(lines, "graphkiln_self_test_error") == 2e-6
    assert value_of(lines, "graphkiln_shared_memory_bytes") == 1 << 20
    assert value_of(lines, "graphkiln_fallbacks_total") == 2
    assert value_of(lines, "graphkiln_nodes", executor="CUDAExecutionProvider") == 2
    assert value_of(lines, "graphkiln_products", precision="bf16") == 4


def test_batch_sizes_are_a_cumulative_histogram(metrics: InstanceMetrics, batch_sizes: deque[int]) -> None:
    for round_ in (1, 2):
        batch_sizes.extend([1, 3, 3, 128, 200])
        lines = [*metrics.lines()]
        found = [value_of(lines, "graphkiln_batch_size_bucket", le=bound) for bound in BOUNDS]
        assert found == [round_ * count for count in (1, 1, 3, 3, 3, 3, 3, 4, 5)]
        assert value_of(lines, "graphkiln_batch_size_sum") == 335 * round_
        assert value_of(lines, "graphkiln_batch_size_count") == 5 * round_
        assert not batch_sizes


def test_failed_requests_by_code() -> None:
    failed = Counter[str]()
    with InstanceMetrics("m_0", STATUS, 0, deque(), failed) as metrics:
        name = "graphkiln_failed_requests_total"
        assert value_of(metrics.lines(), name, code="INTERNAL") == 0, "rates need a first value"
        failed["INTERNAL"] = 3
        assert value_of(metrics.lines(), name, code="INTERNAL") == 3


def test_image_metrics() -> None:
    seconds = deque([0.25, 0.5, 0.25])
    with ImageMetrics("m.images_0", "m.images", "3", {"INVALID_ARG": 2}, seconds) as metrics:
        lines = [*metrics.lines()]
        assert value_of(lines, "graphkiln_decoded_images_total", model="m.images", instance="m.images_0") == 3
        assert value_of(lines, "graphkiln_decode_seconds_total", version="3") == 1
        failed = {code: value_of(lines, "graphkiln_failed_requests_total", code=code) for code in module._CODES}
        assert failed == {**dict.fromkeys(module._CODES, 0), "INVALID_ARG": 2}
        assert not seconds


def test_codes_of_all_error_classes() -> None:
    kinds = [GraphkilnError]
    for kind in kinds:
        kinds += kind.__subclasses__()
    assert {kind.triton_code for kind in kinds} <= set(module._CODES)
    assert all(hasattr(TritonError, code) for code in module._CODES)


def test_replays_and_time_of_the_last_pass(metrics: InstanceMetrics) -> None:
    name = "graphkiln_self_test_timestamp_seconds"
    assert value_of(metrics.lines(), name) == 0  # of a version without golden samples
    before = time.time()
    metrics.count_replay(passed=True)
    dated = value_of(metrics.lines(), name)
    assert before <= dated <= time.time()
    metrics.count_replay(passed=False)
    assert value_of(metrics.lines(), "graphkiln_self_test_replays_total") == 2
    assert value_of(metrics.lines(), "graphkiln_self_test_failures_total") == 1
    assert value_of(metrics.lines(), name) == dated


class TestFile:
    @pytest.fixture(autouse=True)
    def _folder(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv(RUN_FOLDER_VARIABLE, str(tmp_path))
        monkeypatch.setattr(module, "_WRITE_EVERY_S", 0.001)

    def test_metrics_are_those_of_living_instances(self, tmp_path: Path) -> None:
        threads = set(threading.enumerate())
        failed = Counter[str]()
        with InstanceMetrics("m_0", STATUS, 0, deque(), failed) as first, ImageMetrics("i", "i", "1", {}, deque()):
            wait_until(lambda: len(list(tmp_path.glob("*.metrics"))) == 2)
            failed["INTERNAL"] = 7
            wait_until(
                lambda: (
                    value_of(read_metrics(tmp_path), "graphkiln_failed_requests_total", model="m", code="INTERNAL") == 7
                )
            )
            first.close()
            assert {labels_of(line)["model"] for line in read_metrics(tmp_path)} == {"i"}
        assert list(read_metrics(tmp_path)) == []
        assert set(threading.enumerate()) == threads

    def test_killed_instance_has_no_metrics(self, tmp_path: Path) -> None:
        line = sample_line("graphkiln_instance_info", 1, model="m")
        for pid in (os.getpid(), 2**22 + 1):  # the second one is larger than any process id
            (tmp_path / f"m_0.{pid}.metrics").write_text(line)
        assert [*read_metrics(tmp_path)] == [line]

    def test_full_disk_keeps_the_last_values(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        batch_sizes = deque[int]()
        with InstanceMetrics("m_0", STATUS, 0, batch_sizes, {}):
            wait_until(lambda: len(list(tmp_path.glob("*.metrics"))) == 1)
            tried = threading.Event()

            def fail(*_: object) -> None:
                tried.set()
                raise OSError("no space left on device")

            with monkeypatch.context() as patch:
                patch.setattr(module, "write_whole", fail)
                batch_sizes.append(1)
                assert tried.wait(20)
                assert value_of(read_metrics(tmp_path), "graphkiln_batch_size_count") == 0
            wait_until(lambda: value_of(read_metrics(tmp_path), "graphkiln_batch_size_count") == 1)


# The catalog of metrics.


def test_catalog_matches_published_metrics() -> None:
    recorder: Any = SimpleNamespace(recorded=5, dropped=2)
    status = instance_status(nodes={"CPUExecutionProvider": 1}, products={"fp32": 1})
    with (
        InstanceMetrics("m_0", status, 0, deque(), {}, recorder=recorder) as instance,
        ImageMetrics("m.images_0", "m.images", "3", {}, deque()) as images,
    ):
        lines = [*instance.lines(), *images.lines()]
    assert value_of(lines, "graphkiln_recorded_requests_total") == 5
    assert value_of(lines, "graphkiln_record_dropped_total") == 2
    of_instances = [each for each in METRICS if "instance" in each.labels]  # the supervisor publishes the others
    assert labels_by_family(lines) == {each.name: {"model", "version", *each.labels} for each in of_instances}


def labels_by_family(lines: Iterable[str]) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for line in lines:
        found.setdefault(family_of(line), set()).update(labels_of(line))
    return found


def test_values_of_labels_are_escaped() -> None:
    assert sample_line("graphkiln_nodes", 1.5, model='a "b"\\\n') == 'graphkiln_nodes{model="a \\"b\\"\\\\\\n"} 1.5\n'


def test_unknown_metric_has_no_description() -> None:
    assert describe("graphkiln_batch_size") == "rows of each run"
    with pytest.raises(KeyError):
        describe("graphkiln_unknown")
