"""graphkiln's own Prometheus metrics, next to Triton's on the metrics port."""

from __future__ import annotations

import math
import threading
from collections import Counter, deque
from collections.abc import Mapping
from typing import Any

import triton_python_backend_utils as pb_utils

from graphkiln_backend.triton.instance_status import InstanceStatus

_BATCH_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128)
_FLUSH_S = 1.0


class InstanceMetrics:
    """The metrics of one instance; they vanish with it.

    - `graphkiln_instance_info`: 1, with engine, device and precision as labels
    - `graphkiln_nodes`, by executor, and `graphkiln_products` (convolutions and matrix products), by precision: what
      really ran
    - `graphkiln_load_seconds`, `graphkiln_warmup_seconds`
    - `graphkiln_self_test_error`: relative L2 error on the golden samples; -1 for a version without any
    - `graphkiln_batch_size`: histogram of the rows of each run
    - `graphkiln_fallbacks_total`: steps of the lowering plan that failed before the one that serves
    - `graphkiln_shared_memory_bytes`: size of the instance's shared-memory region
    """

    def __init__(self, instance: str, status: InstanceStatus, shared_memory_bytes: int) -> None:
        labels = {"model": status.model, "version": str(status.version), "instance": instance}
        how = {"engine": status.engine, "device": status.device, "precision": status.precision}
        self._kept: list[Any] = []
        self._set("graphkiln_instance_info", "How the instance was lowered", {**labels, **how}, 1)
        for executor, count in status.nodes.items():
            self._set("graphkiln_nodes", "Executed nodes", {**labels, "executor": executor}, count)
        for precision, count in status.products.items():
            self._set("graphkiln_products", "Executed products", {**labels, "precision": precision}, count)
        self._set(
            "graphkiln_load_seconds", "Seconds from the start of loading until ready", labels, status.load_ms / 1e3
        )
        self._set("graphkiln_warmup_seconds", "Seconds of it for warming up", labels, status.warmup_ms / 1e3)
        self._set(
            "graphkiln_self_test_error", "Relative L2 error on the golden samples", labels, status.self_test_error
        )
        self._set("graphkiln_shared_memory_bytes", "Size of the shared-memory region", labels, shared_memory_bytes)
        fallbacks = self.metric(
            pb_utils.MetricFamily.COUNTER, "graphkiln_fallbacks_total", "Lowering steps that failed", labels
        )
        fallbacks.increment(status.fallbacks)
        self._batches = _BatchSizes(self, labels)

    def observe_batch(self, rows: int) -> None:
        """Counts one run; it shows on the metrics port within a second."""
        self._batches.observe(rows)

    def close(self) -> None:
        """Publishes what is counted and stops."""
        self._batches.close()

    def _set(self, name: str, description: str, labels: Mapping[str, str], value: float) -> None:
        self.metric(pb_utils.MetricFamily.GAUGE, name, description, labels).set(value)

    def metric(self, kind: Any, name: str, description: str, labels: Mapping[str, str]) -> Any:
        """A metric that lives as long as this object."""
        family = pb_utils.MetricFamily(name=name, description=description, kind=kind)
        metric = family.Metric(labels=dict(labels))
        self._kept += [family, metric]  # Triton forgets a metric when Python does
        return metric


class _BatchSizes:
    """A Prometheus histogram of batch sizes, kept here and published once a second.

    Triton's own histogram costs a message to the server for every value: 31 us of every run.
    """

    def __init__(self, metrics: InstanceMetrics, labels: Mapping[str, str]) -> None:
        counter = pb_utils.MetricFamily.COUNTER
        name, text = "graphkiln_batch_size", "Rows of each run"
        bounds = [*map(str, _BATCH_BUCKETS), "+Inf"]
        self._buckets = [metrics.metric(counter, f"{name}_bucket", text, {**labels, "le": bound}) for bound in bounds]
        self._sum = metrics.metric(counter, f"{name}_sum", text, labels)
        self._count = metrics.metric(counter, f"{name}_count", text, labels)
        self._seen: deque[int] = deque()  # appended to by the instance, emptied by the thread: both without a lock
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._publish_regularly, name="graphkiln-metrics", daemon=True)
        self._thread.start()

    def observe(self, rows: int) -> None:
        self._seen.append(rows)

    def close(self) -> None:
        self._closing.set()
        self._thread.join()

    def _publish_regularly(self) -> None:
        while not self._closing.wait(_FLUSH_S):
            self._publish()
        self._publish()

    def _publish(self) -> None:
        seen = Counter(self._seen.popleft() for _ in range(len(self._seen)))
        if not seen:
            return
        for bound, bucket in zip((*_BATCH_BUCKETS, math.inf), self._buckets, strict=True):
            bucket.increment(sum(count for rows, count in seen.items() if rows <= bound))
        self._sum.increment(sum(rows * count for rows, count in seen.items()))
        self._count.increment(seen.total())
