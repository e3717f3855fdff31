"""graphkiln's own Prometheus metrics, next to Triton's on the metrics port."""

from __future__ import annotations

import math
import threading
import time
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import triton_python_backend_utils as pb_utils

from graphkiln_backend.system.closing import Closeable
from graphkiln_backend.triton.environment import instances_folder
from graphkiln_backend.triton.features import TritonFeatures
from graphkiln_backend.triton.instance_status import InstanceStatus
from graphkiln_backend.triton.metric_catalog import describe
from graphkiln_backend.triton.restarts import RestartCounts

_BATCH_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128)
_PUBLISH_EVERY_S = 1.0
# Codes of the error classes. Each counter exists from the start with 0: a rate needs a first value.
_CODES = ("CANCELLED", "INTERNAL", "INVALID_ARG", "NOT_FOUND", "UNAVAILABLE")


class InstanceMetrics(Closeable):
    """Metrics of one instance, as listed in `metric_catalog`; Triton drops them when it ends.

    Args:
        instance: Triton's name of the instance.
        status: Its status.
        shared_memory_bytes: Size of its region of shared memory.
        batch_sizes: Rows of each run; the instance appends, this empties it once a second.
        failed: Requests answered with an error so far, by Triton's code; read once a second.
    """

    def __init__(
        self,
        instance: str,
        status: InstanceStatus,
        shared_memory_bytes: int,
        batch_sizes: deque[int],
        failed: Mapping[str, int],
    ) -> None:
        labels = {"model": status.model, "version": str(status.version), "instance": instance}
        serving = {"engine": status.engine, "device": status.device, "precision": status.precision}
        metrics = _Metrics()
        metrics.gauge("graphkiln_instance_info", {**labels, **serving}, 1)
        metrics.gauge("graphkiln_triton_info", {"version": TritonFeatures.of_this_stub().version}, 1)
        for executor, count in status.nodes.items():
            metrics.gauge("graphkiln_nodes", {**labels, "executor": executor}, count)
        for precision, count in status.products.items():
            metrics.gauge("graphkiln_products", {**labels, "precision": precision}, count)
        for name, value in (
            ("graphkiln_load_seconds", status.load_ms / 1e3),
            ("graphkiln_warmup_seconds", status.warmup_ms / 1e3),
            ("graphkiln_self_test_error", status.self_test_error),
            ("graphkiln_shared_memory_bytes", shared_memory_bytes),
        ):
            metrics.gauge(name, labels, value)
        fallbacks = metrics.counter("graphkiln_fallbacks_total", labels)
        fallbacks.increment(status.fallbacks)
        self._replays = metrics.counter("graphkiln_self_test_replays_total", labels)
        self._failures = metrics.counter("graphkiln_self_test_failures_total", labels)
        self._last_pass = metrics.gauge(
            "graphkiln_self_test_timestamp_seconds",
            labels,
            time.time() if status.self_test else 0,
        )
        counts = (_BatchSizeHistogram(metrics, labels, batch_sizes), _Failed(metrics, labels, failed))
        self._publisher = _Publisher(counts, _restart_counts())

    def count_replay(self, *, passed: bool) -> None:
        """Count a replay of the samples."""
        self._replays.increment(1)
        if passed:
            self._last_pass.set(time.time())
        else:
            self._failures.increment(1)

    def close(self) -> None:
        """Publish the last counts and stop."""
        self._publisher.close()


class ImageMetrics(Closeable):
    """Metrics of an instance of `NAME.images`: images decoded, and requests that failed.

    Args:
        instance: Triton's name of the instance.
        model: Model name.
        version: Model version.
        failed: Requests answered with an error so far, by Triton's code.
        decode_seconds: Processor time of each image; the instance appends, this empties it once a second.
    """

    def __init__(
        self, instance: str, model: str, version: str, failed: Mapping[str, int], decode_seconds: deque[float]
    ) -> None:
        labels = {"model": model, "version": version, "instance": instance}
        counts = _Failed(_Metrics(), labels, failed), _Decoded(_Metrics(), labels, decode_seconds)
        self._publisher = _Publisher(counts, None)

    def close(self) -> None:
        """Publish the last counts and stop."""
        self._publisher.close()


class _Metrics:
    """Create metrics and keep them: Triton drops a metric that Python frees."""

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


class _RestartCounter:
    """`graphkiln_restarts_total` of one cause; Triton drops it when Python frees it."""

    def __init__(self, cause: str) -> None:
        kind = pb_utils.MetricFamily.COUNTER
        name = "graphkiln_restarts_total"
        self._family = pb_utils.MetricFamily(name=name, description=describe(name), kind=kind)
        self._metric = self._family.Metric(labels={"cause": cause})

    def increment(self, value: float, /) -> None:
        self._metric.increment(value)


def _restart_counts() -> RestartCounts | None:
    """Counts of restarts; None where no supervisor started this server."""
    folder = instances_folder()
    return RestartCounts(folder, _RestartCounter) if folder else None


class _Counts(Protocol):
    """A count that is published once a second."""

    def publish(self) -> None:
        """Publish what was counted since the last time."""
        ...


class _Failed:
    """Requests that an instance answered with an error, by code; `totals` only grow."""

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


class _Decoded:
    """Images that an instance decoded, and the processor time."""

    def __init__(self, metrics: _Metrics, labels: Mapping[str, str], seconds: deque[float]) -> None:
        self._images = metrics.counter("graphkiln_decoded_images_total", labels)
        self._seconds = metrics.counter("graphkiln_decode_seconds_total", labels)
        self._metrics = metrics  # kept alive
        self._unpublished = seconds  # appended to by the instance, emptied by the thread: both without a lock

    def publish(self) -> None:
        seconds = [self._unpublished.popleft() for _ in range(len(self._unpublished))]
        if seconds:
            self._images.increment(len(seconds))
            self._seconds.increment(sum(seconds))


class _BatchSizeHistogram:
    """Prometheus histogram of batch sizes. Triton's own costs a message to the server for every value: 31 us a run."""

    def __init__(self, metrics: _Metrics, labels: Mapping[str, str], batch_sizes: deque[int]) -> None:
        name = "graphkiln_batch_size"
        bounds = [*map(str, _BATCH_BUCKETS), "+Inf"]
        self._metrics = metrics
        self._buckets = [metrics.counter(f"{name}_bucket", {**labels, "le": bound}, part_of=name) for bound in bounds]
        self._sum = metrics.counter(f"{name}_sum", labels, part_of=name)
        self._count = metrics.counter(f"{name}_count", labels, part_of=name)
        self._batch_sizes = batch_sizes  # appended to by the instance, emptied by the thread: both without a lock

    def publish(self) -> None:
        counts = Counter(self._batch_sizes.popleft() for _ in range(len(self._batch_sizes)))
        if not counts:
            return
        for bound, bucket in zip((*_BATCH_BUCKETS, math.inf), self._buckets, strict=True):
            bucket.increment(sum(count for rows, count in counts.items() if rows <= bound))
        self._sum.increment(sum(rows * count for rows, count in counts.items()))
        self._count.increment(counts.total())


class _Publisher(Closeable):
    """Thread that publishes the counts once a second."""

    def __init__(self, counts: Sequence[_Counts], restarts: RestartCounts | None) -> None:
        self._counts = counts
        self._restarts = restarts
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="graphkiln-metrics", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._closing.set()
        self._thread.join()
        if self._restarts:
            self._restarts.close()

    def _run(self) -> None:
        self._publish()
        while not self._closing.wait(_PUBLISH_EVERY_S):
            self._publish()
        self._publish_counts()

    def _publish(self) -> None:
        self._publish_counts()
        if self._restarts:
            self._restarts.publish()

    def _publish_counts(self) -> None:
        for each in self._counts:
            each.publish()
