"""Readiness and memory of a service, polled in threads while a soak runs."""

from __future__ import annotations

import http.client
import os
import statistics
import threading
import time
from abc import abstractmethod
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import psutil

from graphkiln_backend.system.closing import Closeable
from soaking.guard import known_runs, regions_of
from soaking.service import Service, role_of

_GAP_S = 0.5  # readiness failures further apart are separate
_LOG_BYTES = 1000


class _Poller(Closeable):
    """Call `read` every `period_s` seconds in a thread, until it is closed."""

    period_s: float

    def __init__(self, service: Service) -> None:
        self._service = service
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._poll, daemon=True)
        self._thread.start()

    def _poll(self) -> None:
        while not self._stopping.wait(self.period_s):
            with suppress(psutil.Error):  # a process has just exited
                self.read()

    @abstractmethod
    def read(self) -> None:
        """Read once."""

    def close(self) -> None:
        """Stop the thread."""
        self._stopping.set()
        self._thread.join(10)


@dataclass(frozen=True, kw_only=True, slots=True)
class Lapse:
    """A readiness poll that failed.

    Attributes:
        begun: Start of the poll; monotonic seconds.
        ended: End of the poll.
        status: HTTP status, or None without an answer.
        models: Models that were not ready, if the server answered.
        log: Last line of the service's log.
    """

    begun: float
    ended: float
    status: int | None
    models: tuple[str, ...] = ()
    log: str = ""

    def describe(self, since: float) -> str:
        """Describe it in one line.

        Args:
            since: Reference time of the seconds.
        """
        who = f", not ready: {', '.join(self.models)}" if self.models else ""
        return f"{self.begun - since:.1f} s: {self.status or 'no answer'}{who}; the log: {self.log}"


class Readiness(_Poller):
    """Poll readiness ten times a second, like a load balancer."""

    period_s = 0.1

    def __init__(self, service: Service) -> None:
        self._lapses: list[Lapse] = []
        super().__init__(service)

    def read(self) -> None:
        begun = time.monotonic()
        status = self._service.ready_status()
        if status != http.HTTPStatus.OK:
            self._lapses.append(self._examine(begun, time.monotonic(), status))

    def _examine(self, begun: float, ended: float, status: int | None) -> Lapse:
        models = self._service.unready_models() if status == http.HTTPStatus.BAD_REQUEST else ()
        log = self._service.log_tail(_LOG_BYTES).rstrip().rpartition("\n")[2]
        return Lapse(begun=begun, ended=ended, status=status, models=models, log=log)

    def last_failure(self, begin: float, end: float) -> float | None:
        """Time of the last readiness failure in an interval."""
        return max((lapse.ended for lapse in self._between(begin, end)), default=None)

    def longest_s(self, begin: float, end: float) -> float:
        """Longest time without readiness in an interval, in seconds."""
        longest = since = 0.0
        last = -_GAP_S
        for lapse in self._between(begin, end):
            since = since if lapse.begun - last < _GAP_S else lapse.begun
            last = lapse.ended
            longest = max(longest, last - since)
        return longest

    def statuses(self, begin: float, end: float) -> dict[str, int]:
        """Count readiness failures in an interval by HTTP status."""
        return dict(Counter(str(lapse.status or "no answer") for lapse in self._between(begin, end)))

    def _between(self, begin: float, end: float) -> list[Lapse]:
        return [lapse for lapse in list(self._lapses) if lapse.ended >= begin and lapse.begun <= end]

    def lapses_outside(self, windows: list[tuple[float, float]]) -> list[Lapse]:
        """Readiness failures outside of the intervals."""
        return [
            lapse
            for lapse in list(self._lapses)
            if all(lapse.ended < begin or lapse.begun > end for begin, end in windows)
        ]


# Memory and open files of the service, sampled in total and for each process.
#
# Young processes grow: arenas, pools and caches fill up after each restart. So a leak is growth of a process that is no
# longer young. Only private memory (USS) and the service's shared-memory regions count; memory shared with other
# programs, such as libraries, would appear to grow whenever one of them exits.

GROWTH_LIMIT = 0.25
# Memory grows if its median in the last third exceeds that of the first third by both limits.
GROWTH_LIMIT_MB = 100.0
# A process is young until this age: without faults, its memory is constant afterwards.
YOUNG_S = 240.0
LEAK_MB_PER_MINUTE = 1.0  # limit for one process; 1.4 GB in a day
_SHORTEST_S = 120.0  # shorter series have no meaningful slope

Reading = tuple[float, float]  # monotonic seconds, and megabytes


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """A sample of all processes.

    Attributes:
        at: Monotonic seconds.
        instances: Number of instance processes.
        mb: Private memory of all processes, and shared-memory regions.
        regions_mb: Shared-memory regions.
        files: Open files of the supervisor.
    """

    at: float
    instances: int
    mb: float
    regions_mb: float
    files: int


@dataclass(slots=True)
class Life:
    """Memory of one process.

    Attributes:
        role: `supervisor`, `tritonserver`, `instance of MODEL/VERSION`.
        begun: Monotonic seconds.
        readings: Private memory (USS).
    """

    role: str
    begun: float
    readings: list[Reading] = field(default_factory=list)

    def grown(self) -> list[Reading]:
        """Readings after the process was young."""
        return [reading for reading in self.readings if reading[0] - self.begun >= YOUNG_S]


class Memory(_Poller):
    """Sample the service's memory."""

    period_s = 2.0

    def __init__(self, service: Service) -> None:
        self.samples: list[Sample] = []
        self.lives: dict[int, Life] = {}  # by process id; the kernel does not reuse one within a soak
        super().__init__(service)

    def read(self) -> None:
        runs = known_runs(self._service.temporary)  # remember each run
        tree = self._service.tree()
        if len(tree) < 2:
            return
        at = time.monotonic()
        megabytes = [self._read_process(process, at) for process in tree]
        blocks = 0
        for region in regions_of(os.getpid(), runs):
            with suppress(OSError):  # it has just been removed
                blocks += region.stat().st_blocks
        regions_mb = blocks * 512 / 2**20  # Source: stat(2)
        self.samples.append(
            Sample(
                at=at,
                instances=len(self._service.stubs()),
                mb=sum(megabytes) + regions_mb,
                regions_mb=regions_mb,
                files=tree[0].num_fds(),
            )
        )

    def _read_process(self, process: psutil.Process, at: float) -> float:
        mb: float = process.memory_full_info().uss / 2**20
        begun = at - (time.time() - process.create_time())
        self.lives.setdefault(process.pid, Life(role_of(process), begun)).readings.append((at, mb))
        return mb


def growth(samples: list[Sample]) -> dict[str, float]:
    """Start, end and slope of memory, from samples with the usual number of instances."""
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
    """Slope of a regression line in megabytes per minute; 0 for readings at one time."""
    if len({at for at, _ in readings}) < 2:
        return 0.0
    minutes = [at / 60 for at, _ in readings]
    return statistics.linear_regression(minutes, [mb for _, mb in readings]).slope


def by_role(lives: Iterable[Life]) -> dict[str, dict[str, Any]]:
    """Summarize memory of processes by role.

    Returns:
        By role: `processes`, their number; `mb_by_minute`, the median of their memory in each minute of their lives;
        `slope_mb_per_minute`, the steepest slope of a process that is no longer young, or None.
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
    """Return true if the memory of all processes grew by more than the limits."""
    added = figures["end_mb"] - figures["start_mb"]
    return added > GROWTH_LIMIT_MB and added > GROWTH_LIMIT * figures["start_mb"]


def leaking(roles: dict[str, dict[str, Any]]) -> list[str]:
    """Describe processes that kept growing when they were no longer young."""
    slopes = {role: each["slope_mb_per_minute"] or 0.0 for role, each in roles.items()}
    return [f"{role} {value} MB/min" for role, value in slopes.items() if value > LEAK_MB_PER_MINUTE]
