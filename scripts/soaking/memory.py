"""Memory and open files of the service, read again and again."""

from __future__ import annotations

import statistics
import threading
import time
from dataclasses import dataclass

import psutil

from graphkiln_backend.graph.closing import Closeable
from soaking.guard import known_runs
from soaking.service import Service

_PERIOD_S = 2.0
GROWTH_LIMIT = 0.25
GROWTH_LIMIT_MB = 100.0
"""Memory grows when its median in the last third is above that of the first third by more than both."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """One reading.

    Attributes:
        at: Monotonic seconds.
        instances: Number of processes of instances.
        mb: Memory of the service's processes that no other process shares, and its part of the shared (PSS).
        supervisor_mb: Resident memory of the supervisor.
        files: Open files of the supervisor.
    """

    at: float
    instances: int
    mb: float
    supervisor_mb: float
    files: int


class Memory(Closeable):
    """A thread that reads the memory of the service.

    Args:
        service: Whose.
    """

    def __init__(self, service: Service) -> None:
        self._service = service
        self.samples: list[Sample] = []
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        while not self._stopping.wait(_PERIOD_S):
            try:
                self._read()
            except psutil.Error:
                continue  # a process has just ended: the next reading is whole

    def _read(self) -> None:
        known_runs(self._service.temporary)  # each that is seen is remembered
        tree = self._service.tree()
        if len(tree) < 2:
            return
        supervisor = tree[0]
        sample = Sample(
            at=time.monotonic(),
            instances=len(self._service.stubs()),
            mb=sum(process.memory_full_info().pss for process in tree) / 2**20,
            supervisor_mb=supervisor.memory_info().rss / 2**20,
            files=supervisor.num_fds(),
        )
        self.samples.append(sample)

    def close(self) -> None:
        """Ends the thread."""
        self._stopping.set()
        self._thread.join(10)


def growth(samples: list[Sample]) -> dict[str, float]:
    """Start, end and slope of the service's memory, of readings with the usual number of instances."""
    usual = statistics.mode(sample.instances for sample in samples)
    kept = [sample for sample in samples if sample.instances == usual]
    third = max(1, len(kept) // 3)
    start, end = ([sample.mb for sample in part] for part in (kept[:third], kept[-third:]))
    minutes = [(sample.at - kept[0].at) / 60 for sample in kept]
    several = len(set(minutes)) > 1
    slope = statistics.linear_regression(minutes, [sample.mb for sample in kept]).slope if several else 0.0
    return {
        "instances": usual,
        "start_mb": round(statistics.median(start), 1),
        "end_mb": round(statistics.median(end), 1),
        "slope_mb_per_minute": round(slope, 2),
        "worst_mb": round(max(sample.mb for sample in samples), 1),
        "supervisor_start_mb": round(kept[0].supervisor_mb, 1),
        "supervisor_end_mb": round(kept[-1].supervisor_mb, 1),
        "supervisor_files_start": kept[0].files,
        "supervisor_files_end": kept[-1].files,
    }


def grows(figures: dict[str, float]) -> bool:
    """Whether the memory grew by more than the limits."""
    added = figures["end_mb"] - figures["start_mb"]
    return added > GROWTH_LIMIT_MB and added > GROWTH_LIMIT * figures["start_mb"]
