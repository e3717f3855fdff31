"""graphkiln's own Prometheus metrics, next to Triton's on the metrics port."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import triton_python_backend_utils as pb_utils

from graphkiln.triton.instance_status import InstanceStatus

_BATCH_BUCKETS = [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0]


class InstanceMetrics:
    """The metrics of one instance; they vanish with it.

    - `graphkiln_instance_info`: 1, with engine, device and precision as labels
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
        self._set(
            "graphkiln_load_seconds", "Seconds from the start of loading until ready", labels, status.load_ms / 1e3
        )
        self._set("graphkiln_warmup_seconds", "Seconds of it for warming up", labels, status.warmup_ms / 1e3)
        self._set(
            "graphkiln_self_test_error", "Relative L2 error on the golden samples", labels, status.self_test_error
        )
        self._set("graphkiln_shared_memory_bytes", "Size of the shared-memory region", labels, shared_memory_bytes)
        fallbacks = self._metric(
            pb_utils.MetricFamily.COUNTER, "graphkiln_fallbacks_total", "Lowering steps that failed", labels
        )
        fallbacks.increment(status.fallbacks)
        self._batch_size = self._metric(
            pb_utils.MetricFamily.HISTOGRAM, "graphkiln_batch_size", "Rows of each run", labels, buckets=_BATCH_BUCKETS
        )

    def observe_batch(self, rows: int) -> None:
        """Counts one run."""
        self._batch_size.observe(rows)

    def _set(self, name: str, description: str, labels: Mapping[str, str], value: float) -> None:
        self._metric(pb_utils.MetricFamily.GAUGE, name, description, labels).set(value)

    def _metric(self, kind: Any, name: str, description: str, labels: Mapping[str, str], **options: Any) -> Any:
        family = pb_utils.MetricFamily(name=name, description=description, kind=kind)
        metric = family.Metric(labels=dict(labels), **options)
        self._kept += [family, metric]  # Triton forgets a metric when Python does
        return metric
