"""Prometheus metrics of an instance, next to Triton's on its metrics port; `metric_catalog` describes them."""

from __future__ import annotations

import math
import threading
import time
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import triton_python_backend_utils as pb_utils

from graphkiln_backend.system.closing import Closeable
from graphkiln_backend.triton.instance_status import InstanceStatus
from graphkiln_backend.triton.metric_catalog import describe

if TYPE_CHECKING:
    from graphkiln_backend.triton.recording import Recorder

_BATCH_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128)
_PUBLISH_EVERY_S = 1.0
# Triton's codes of all error classes. Each counter exists from the start with 0: a rate needs a first value.
_CODES = ("CANCELLED", "INTERNAL", "INVALID_ARG", "NOT_FOUND", "UNAVAILABLE")


class _Counts(Protocol):
    """Counts that a publisher publishes once a second."""

    def publish(self) -> None:
        """Publish what was counted since the last call."""
        ...


class _Publisher(Closeable):
    """Publish counts once a second in a thread.

    Args:
        counts: Counts of this instance.
    """

    def __init__(self, counts: Sequence[_Counts]) -> None:
        self._counts = counts
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="graphkiln-metrics", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Publish the last counts and stop."""
        self._closing.set()
        self._thread.join()

    def _run(self) -> None:
        while True:
            is_last = self._closing.is_set()
            for counts in self._counts:
                counts.publish()
            if is_last:
                return
            self._closing.wait(_PUBLISH_EVERY_S)


class InstanceMetrics(_Publisher):
    """Metrics of one instance; Triton drops them when the instance ends.

    Args:
        instance: Triton's name of the instance.
        status: Its status.
        shared_memory_bytes: Size of its region of shared memory.
        batch_sizes: Rows of each run: the instance appends, the publisher removes.
        failed: Requests answered with an error so far, by Triton's code.
        recorder: Records requests, or None.
    """

    def __init__(
        self,
        instance: str,
        status: InstanceStatus,
        shared_memory_bytes: int,
        batch_sizes: deque[int],
        failed: Mapping[str, int],
        *,
        recorder: Recorder | None = None,
    ) -> None:
        # No metric without `instance`: Triton (24.10) can crash when instances that share a metric end together.
        labels = {"model": status.model, "version": str(status.version), "instance": instance}
        serving = {"engine": status.engine, "device": status.device, "precision": status.precision}
        metrics = _Metrics()
        metrics.gauge("graphkiln_instance_info", {**labels, **serving}, 1)
        for executor, count in status.nodes.items():
            metrics.gauge("graphkiln_nodes", {**labels, "executor": executor}, count)
        for precision, count in status.products.items():
            metrics.gauge("graphkiln_products", {**labels, "precision": precision}, count)
        metrics.gauge("graphkiln_load_seconds", labels, status.load_ms / 1e3)
        metrics.gauge("graphkiln_warmup_seconds", labels, status.warmup_ms / 1e3)
        metrics.gauge("graphkiln_self_test_error", labels, status.self_test_error)
        metrics.gauge("graphkiln_shared_memory_bytes", labels, shared_memory_bytes)
        metrics.counter("graphkiln_fallbacks_total", labels).increment(status.fallbacks)
        self._replays = metrics.counter("graphkiln_self_test_replays_total", labels)
        self._failures = metrics.counter("graphkiln_self_test_failures_total", labels)
        passed_at = time.time() if status.self_test else 0
        self._last_pass = metrics.gauge("graphkiln_self_test_timestamp_seconds", labels, passed_at)
        recorded = (_Recorded(metrics, labels, recorder),) if recorder else ()
        super().__init__(
            (_BatchSizeHistogram(metrics, labels, batch_sizes), _Failed(metrics, labels, failed), *recorded)
        )

    def count_replay(self, *, passed: bool) -> None:
        """Count a replay of the samples."""
        self._replays.increment(1)
        if passed:
            self._last_pass.set(time.time())
        else:
            self._failures.increment(1)


class ImageMetrics(_Publisher):
    """Metrics of an instance of `NAME.images`: decoded images and failed requests.

    Args:
        instance: Triton's name of the instance.
        model: Model name.
        version: Model version.
        failed: Requests answered with an error so far, by Triton's code.
        decode_seconds: Processor time of each image: the instance appends, the publisher removes.
    """

    def __init__(
        self, instance: str, model: str, version: str, failed: Mapping[str, int], decode_seconds: deque[float]
    ) -> None:
        labels = {"model": model, "version": version, "instance": instance}
        metrics = _Metrics()
        super().__init__((_Failed(metrics, labels, failed), _Decoded(metrics, labels, decode_seconds)))


class _Metrics:
    """Create metrics and keep references to them: Triton drops a metric once Python frees it."""

    def __init__(self) -> None:
        self._alive: list[Any] = []

    def gauge(self, name: str, labels: Mapping[str, str], value: float) -> Any:
        gauge = self._create(pb_utils.MetricFamily.GAUGE, name, describe(name), labels)
        gauge.set(value)
        return gauge

    def counter(self, name: str, labels: Mapping[str, str], *, part_of: str = "") -> Any:
        return self._create(pb_utils.MetricFamily.COUNTER, name, describe(part_of or name), labels)

    def _create(self, kind: Any, name: str, description: str, labels: Mapping[str, str]) -> Any:
        family = pb_utils.MetricFamily(name=name, description=description, kind=kind)
        metric = family.Metric(labels=dict(labels))
        self._alive += [family, metric]
        return metric


class _Failed:
    """Requests answered with an error, by code; `totals` only grow."""

    def __init__(self, metrics: _Metrics, labels: Mapping[str, str], totals: Mapping[str, int]) -> None:
        name = "graphkiln_failed_requests_total"
        self._counters = {code: metrics.counter(name, {**labels, "code": code}) for code in _CODES}
        self._metrics = metrics  # kept alive
        self._totals = totals
        self._published: Counter[str] = Counter()

    def publish(self) -> None:
        for code, counter in self._counters.items():
            if more := self._totals.get(code, 0) - self._published[code]:
                counter.increment(more)
                self._published[code] += more


class _Recorded:
    """Recorded and dropped requests."""

    def __init__(self, metrics: _Metrics, labels: Mapping[str, str], recorder: Recorder) -> None:
        self._recorded = metrics.counter("graphkiln_recorded_requests_total", labels)
        self._dropped = metrics.counter("graphkiln_record_dropped_total", labels)
        self._recorder = recorder
        self._published = (0, 0)

    def publish(self) -> None:
        totals = (self._recorder.recorded, self._recorder.dropped)
        for counter, total, before in zip((self._recorded, self._dropped), totals, self._published, strict=True):
            counter.increment(total - before)
        self._published = totals


class _Decoded:
    """Decoded images and their processor time."""

    def __init__(self, metrics: _Metrics, labels: Mapping[str, str], seconds: deque[float]) -> None:
        self._images = metrics.counter("graphkiln_decoded_images_total", labels)
        self._seconds = metrics.counter("graphkiln_decode_seconds_total", labels)
        self._unpublished = seconds  # a deque needs no lock between the instance and the publisher

    def publish(self) -> None:
        seconds = [self._unpublished.popleft() for _ in range(len(self._unpublished))]
        if seconds:
            self._images.increment(len(seconds))
            self._seconds.increment(sum(seconds))


class _BatchSizeHistogram:
    """Prometheus histogram of batch sizes. Triton's own costs a message to the server per value: 31 us a run."""

    def __init__(self, metrics: _Metrics, labels: Mapping[str, str], batch_sizes: deque[int]) -> None:
        name = "graphkiln_batch_size"
        bounds = [*map(str, _BATCH_BUCKETS), "+Inf"]
        self._buckets = [metrics.counter(f"{name}_bucket", {**labels, "le": bound}, part_of=name) for bound in bounds]
        self._sum = metrics.counter(f"{name}_sum", labels, part_of=name)
        self._count = metrics.counter(f"{name}_count", labels, part_of=name)
        self._batch_sizes = batch_sizes  # a deque needs no lock between the instance and the publisher

    def publish(self) -> None:
        counts = Counter(self._batch_sizes.popleft() for _ in range(len(self._batch_sizes)))
        if not counts:
            return
        for bound, bucket in zip((*_BATCH_BUCKETS, math.inf), self._buckets, strict=True):
            bucket.increment(sum(count for rows, count in counts.items() if rows <= bound))
        self._sum.increment(sum(rows * count for rows, count in counts.items()))
        self._count.increment(counts.total())
