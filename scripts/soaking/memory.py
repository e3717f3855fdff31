"""Memory and open files of the service, read again and again: of all of it, and of each process over its life.

A process takes memory while it is young: arenas, pools and caches fill up with use, and each restart begins that anew.
What counts as a leak is therefore told from a process's age: memory that a process which is no longer young still
takes. Only memory that a process has for itself is counted (USS), and the service's regions of shared memory: what is
shared with other programs of the machine, such as libraries, looks larger whenever one of those ends.
"""

from __future__ import annotations

import os
import statistics
import threading
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from graphkiln_backend.system.closing import Closeable
from soaking.guard import known_runs, regions_of
from soaking.service import Service, role_of

_PERIOD_S = 2.0
GROWTH_LIMIT = 0.25
GROWTH_LIMIT_MB = 100.0
"""Memory grows when its median in the last third is above that of the first third by more than both."""
YOUNG_S = 240.0
"""Until this age a process may fill its pools: in control runs without any fault the curves are flat from then on."""
LEAK_MB_PER_MINUTE = 1.0
"""Of one process that is no longer young. In a day this would be 1.4 GB."""
_SHORTEST_S = 120.0
"""Readings over less time than this tell nothing of a slope."""

Reading = tuple[float, float]
"""Monotonic seconds, and megabytes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """One reading of all processes.

    Attributes:
        at: Monotonic seconds.
        instances: Number of processes of instances.
        mb: What the service's processes have for themselves, and its regions.
        regions_mb: Its regions of shared memory.
        files: Open files of the supervisor.
    """

    at: float
    instances: int
    mb: float
    regions_mb: float
    files: int


@dataclass(slots=True)
class Life:
    """One process.

    Attributes:
        role: What it does: `supervisor`, `tritonserver`, `instance of MODEL/VERSION`.
        begun: Monotonic seconds.
        readings: What it has for itself (USS).
    """

    role: str
    begun: float
    readings: list[Reading] = field(default_factory=list)

    def grown(self) -> list[Reading]:
        """The readings since it is no longer young."""
        return [reading for reading in self.readings if reading[0] - self.begun >= YOUNG_S]


class Memory(Closeable):
    """A thread that reads the memory of the service.

    Args:
        service: Whose.
    """

    def __init__(self, service: Service) -> None:
        self._service = service
        self.samples: list[Sample] = []
        self.lives: dict[int, Life] = {}
        """By process id: none comes twice within a soak, since the kernel counts on."""
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
        runs = known_runs(self._service.temporary)  # each that is seen is remembered
        tree = self._service.tree()
        if len(tree) < 2:
            return
        at = time.monotonic()
        megabytes = [self._read_process(process, at) for process in tree]
        regions_mb = _size_mb(regions_of(os.getpid(), runs))
        sample = Sample(
            at=at,
            instances=len(self._service.stubs()),
            mb=sum(megabytes) + regions_mb,
            regions_mb=regions_mb,
            files=tree[0].num_fds(),
        )
        self.samples.append(sample)

    def _read_process(self, process: psutil.Process, at: float) -> float:
        mb: float = process.memory_full_info().uss / 2**20
        begun = at - (time.time() - process.create_time())
        self.lives.setdefault(process.pid, Life(role_of(process), begun)).readings.append((at, mb))
        return mb

    def close(self) -> None:
        """Ends the thread."""
        self._stopping.set()
        self._thread.join(10)


def _size_mb(regions: list[Path]) -> float:
    """Of the pages that regions have."""
    blocks = 0
    for region in regions:
        with suppress(OSError):  # it has just been removed
            blocks += region.stat().st_blocks
    return blocks * 512 / 2**20  # Source: stat(2)


def growth(samples: list[Sample]) -> dict[str, float]:
    """Start, end and slope of the service's memory, of readings with the usual number of instances."""
    usual = statistics.mode(sample.instances for sample in samples)
    kept = [sample for sample in samples if sample.instances == usual]
    third = max(1, len(kept) // 3)
    start, end = ([sample.mb for sample in part] for part in (kept[:third], kept[-third:]))
    return {
        "instances": usual,
        "start_mb": round(statistics.median(start), 1),
        "end_mb": round(statistics.median(end), 1),
        "slope_mb_per_minute": round(slope([(sample.at, sample.mb) for sample in kept]), 2),
        "regions_start_mb": round(kept[0].regions_mb, 1),
        "regions_end_mb": round(kept[-1].regions_mb, 1),
        "worst_mb": round(max(sample.mb for sample in samples), 1),
        "supervisor_files_start": kept[0].files,
        "supervisor_files_end": kept[-1].files,
    }


def slope(readings: Sequence[Reading]) -> float:
    """Megabytes per minute of a straight line through readings; 0 where they are of one moment."""
    if len({at for at, _ in readings}) < 2:
        return 0.0
    minutes = [at / 60 for at, _ in readings]
    return statistics.linear_regression(minutes, [mb for _, mb in readings]).slope


def by_role(lives: Iterable[Life]) -> dict[str, dict[str, Any]]:
    """What processes of each role took over their lives.

    Returns:
        By role: `processes`, their number; `mb_by_minute`, the median of their memory in each minute of their lives;
        and `slope_mb_per_minute`, the steepest slope of one that is no longer young, None where none got that old.
    """
    roles: dict[str, list[Life]] = {}
    for life in lives:
        roles.setdefault(life.role, []).append(life)
    return {role: _of_role(of_role) for role, of_role in sorted(roles.items())}


def _of_role(lives: list[Life]) -> dict[str, Any]:
    minutes: dict[int, list[float]] = {}
    for life in lives:
        for at, mb in life.readings:
            minutes.setdefault(int((at - life.begun) / 60), []).append(mb)
    slopes = [slope(grown) for life in lives if _is_long(grown := life.grown())]
    return {
        "processes": len(lives),
        "mb_by_minute": {minute: round(statistics.median(values), 1) for minute, values in sorted(minutes.items())},
        "slope_mb_per_minute": round(max(slopes), 2) if slopes else None,
    }


def _is_long(readings: Sequence[Reading]) -> bool:
    return bool(readings) and readings[-1][0] - readings[0][0] >= _SHORTEST_S


def grows(figures: dict[str, float]) -> bool:
    """Whether the memory of all processes grew by more than the limits."""
    added = figures["end_mb"] - figures["start_mb"]
    return added > GROWTH_LIMIT_MB and added > GROWTH_LIMIT * figures["start_mb"]


def leaking(roles: dict[str, dict[str, Any]]) -> list[str]:
    """Which processes still took memory when they were no longer young, and how much."""
    slopes = {role: each["slope_mb_per_minute"] or 0.0 for role, each in roles.items()}
    return [f"{role} {value} MB/min" for role, value in slopes.items() if value > LEAK_MB_PER_MINUTE]
