"""A soak: servers made on the spot, traffic of all kinds, faults, and a report."""

from __future__ import annotations

import logging
import os
import random
import statistics
import threading
import time
from collections.abc import Iterable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import psutil

from graphkiln_backend.graph.errors import GraphkilnError, MeasurementError
from graphkiln_backend.server.run_folder import environments_of
from graphkiln_backend.system.closing import Closeable
from soaking.faults import MODES, STORE, Fault, Field, Mode, Over, stage
from soaking.guard import guarded_folder, known_runs, regions_of
from soaking.models import build_store
from soaking.service import Readiness, Service, every_model_answers, role_of
from soaking.traffic import Ledger, Outcome, Traffic

Only = Literal["", "traffic", "faults"]  # control runs: traffic without faults, or faults without traffic
_INTERRUPTED = "interrupted: the report is about the time until then"


@dataclass(frozen=True, kw_only=True)
class Result:
    """Result of the soak of one mode.

    Attributes:
        mode: How the service ran.
        seed: Of all random choices.
        seconds: How long traffic ran.
        first_start_s: Seconds of the first start, until every model answered.
        counts: Number of requests by sender and verdict.
        bad: Wrong answers and lost requests.
        unexplained: Requests refused while no fault was at work.
        unready: What happened when readiness failed while no fault was at work.
        injections: The faults.
        figures: Memory of all processes.
        processes: Memory of processes over their lives, by role.
        left: What the last stop left behind.
        stops: Exit code and seconds of each SIGTERM.
        stuck: Senders that did not end.
        notes: What else is to be known.
        only: Whether this was a control run.
    """

    mode: str = ""
    seed: int
    seconds: float
    first_start_s: float = 0.0
    counts: dict[str, dict[str, int]]
    bad: list[Outcome]
    unexplained: list[Outcome]
    unready: list[str]
    injections: list[Injection]
    figures: dict[str, float]
    processes: dict[str, dict[str, Any]] = field(default_factory=dict)
    left: list[str]
    stops: list[tuple[int, float]]
    stuck: int
    notes: list[str]
    only: Only = ""


def soak(
    minutes: float, seed: int, *, heavy: bool = True, keep_log: Path | None = None, only: Only = ""
) -> list[Result]:
    """Soak the service in each mode.

    Args:
        minutes: How long faults are injected, in all modes together.
        seed: Of all random choices.
        heavy: With faults after which the whole service restarts.
        keep_log: Where the service's log is kept.
        only: A control run: traffic without faults, or the reverse.

    Raises:
        MeasurementError: A service could not be started.
    """
    results: list[Result] = []
    if keep_log:
        keep_log.write_bytes(b"")
    for mode in MODES:
        with ExitStack() as stack:
            folder = stack.enter_context(guarded_folder("soak-"))
            build_store(folder / STORE)
            made = stack.enter_context(stage(folder, mode))
            if keep_log:
                stack.callback(made.service.append_log, keep_log)
            first_start_s = start_service(made.service)
            faults = [] if only == "traffic" else made.faults(mode, heavy=heavy)
            result = _soak_service(made.service, folder, faults, minutes / len(MODES), seed, mode=mode, only=only)
        results.append(replace(result, first_start_s=first_start_s, notes=made.notes + result.notes))
        if _INTERRUPTED in result.notes:
            break
    return results


def start_service(service: Service) -> float:
    """Start a service; return the seconds until every model answered.

    Raises:
        MeasurementError: It does not come up.
    """
    begun = time.monotonic()
    service.start()
    service.wait_ready()
    while not every_model_answers(service):
        if time.monotonic() - begun > 60:
            raise MeasurementError(f"not every model answers:\n{service.log_tail()}")
        time.sleep(0.2)
    return time.monotonic() - begun


def _soak_service(
    service: Service, folder: Path, faults: list[Fault], minutes: float, seed: int, *, mode: Mode, only: Only
) -> Result:
    """Inject faults under traffic until the time is over, and stop the service."""
    ledger = Ledger()
    traffic = Traffic(service, ledger, seed, senders=0 if only == "faults" else None)
    where = Field(
        service=service,
        folder=folder,
        store=folder / STORE,
        versions=traffic.versions,
        ledger=ledger,
        chance=random.Random(seed),
        explicit=mode.explicit,
    )
    notes: list[str] = []
    begun = time.monotonic()
    with Readiness(service) as readiness, Memory(service) as memory:
        traffic.start()
        injector = Injector(where=where, readiness=readiness, faults=faults)
        try:
            injector.run(begun + minutes * 60)
        except KeyboardInterrupt:
            notes.append(_INTERRUPTED)
        except GraphkilnError as error:
            notes.append(f"ended early: {error}")
        stuck = traffic.stop()
    seconds = time.monotonic() - begun
    with suppress(Exception):
        where.stops.append(service.stop())
    if where.live_s:
        notes.append(f"good versions: {len(where.live_s)}, live after {max(where.live_s):.1f} s at worst")
    windows = injector.windows()
    refused = ledger.failures("refused")
    return Result(
        mode=mode.name,
        seed=seed,
        seconds=seconds,
        counts=ledger.counts(),
        bad=ledger.failures("wrong", "lost"),
        unexplained=[outcome for outcome in refused if _is_outside(outcome, windows)],
        unready=[lapse.describe(begun) for lapse in readiness.lapses_outside(windows)],
        injections=injector.injections,
        figures=growth(memory.samples) if memory.samples else {},
        processes=by_role(memory.lives.values()),
        left=leftovers(service),
        stops=where.stops,
        stuck=stuck,
        notes=notes,
        only=only,
    )


def _is_outside(outcome: Outcome, windows: list[tuple[float, float]]) -> bool:
    return all(outcome.ended < begin or outcome.begun > end for begin, end in windows)


def leftovers(service: Service) -> list[str]:
    """Processes, temporary files and shared-memory regions that the stopped service has left."""
    files = [str(path.relative_to(service.temporary)) for path in sorted(service.temporary.iterdir())]
    runs = known_runs(service.temporary)
    regions = [path.name for path in regions_of(os.getpid(), runs)]
    environments = [str(path) for run in sorted(runs) for path in environments_of(run)]
    return [*files, *regions, *environments, *(f"process {process.pid}" for process in service.tree()[1:])]


# Injects faults one after the other, and measures how long the service takes to recover from each.

_log = logging.getLogger("graphkiln.soak")

# A service that is not ready again by then has failed. Generous: the machine is shared with the load generator.
RECOVERY_LIMIT_S = 60.0
# For so long after a recovery, errors still belong to the fault: retries, connections that are found broken.
AFTERMATH_S = 3.0
_POLL_S = 0.05
# With the aftermath, more than the 5 s of service that pay for one restart: a service that is hit more often ends.
_QUIET_S = (4.0, 8.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Injection:
    """A fault that was injected, and what followed.

    Attributes:
        fault: Its name.
        begun: When it was injected; monotonic seconds.
        ended: When the service had recovered, or was given up.
        ready_again_s: Seconds from the fault until the service was seen to be ready again for good, and every model
            answered rightly over both protocols; 0 when it never was otherwise; None beyond the limit. Of a fault that
            stays for a while: the longest time without readiness.
        unready: Statuses of readiness other than 200 meanwhile, polled ten times a second.
        errors: What clients saw meanwhile.
        restarts: What the service added to its metric of restarts.
        cause: Of the restart that the fault must lead to; empty for none.
        trouble: Why the fault could not be injected, or why the service had to be started again by the soak.
    """

    fault: str
    begun: float
    ended: float
    ready_again_s: float | None
    unready: dict[str, int]
    errors: dict[str, int]
    restarts: dict[str, int]
    cause: str = ""
    trouble: str = ""


@dataclass(kw_only=True)
class Injector:
    """Injects faults in a random order."""

    where: Field
    readiness: Readiness
    faults: list[Fault]
    injections: list[Injection] = field(default_factory=list)
    _round: list[Fault] = field(default_factory=list)

    def run(self, until: float) -> None:
        """Inject faults until a moment; each kind comes once before one comes again."""
        while time.monotonic() < until:
            time.sleep(self.where.chance.uniform(*_QUIET_S))
            if self.faults and time.monotonic() < until:
                self._inject(self._choose())

    def windows(self) -> list[tuple[float, float]]:
        """The intervals in which errors are to be expected."""
        return [(injection.begun, injection.ended + AFTERMATH_S) for injection in self.injections]

    def _choose(self) -> Fault:
        if not self._round:
            self._round = self.where.chance.sample(self.faults, len(self.faults))
        return self._round.pop()

    def _inject(self, fault: Fault) -> None:
        service = self.where.service
        before = service.restarts()
        begun = time.monotonic()
        ready_again_s, trouble = self._hit(fault, begun)
        state = "never ready again" if ready_again_s is None else f"ready after {ready_again_s:.1f} s"
        _log.info("%s: %s %s", fault.name, state, trouble)
        if not service.is_running() or ready_again_s is None:
            trouble = trouble or "the soak had to start the service again"
            self._start_anew()
        ended = time.monotonic()
        time.sleep(AFTERMATH_S)
        restarts = {} if fault.begins_anew or trouble else _added(before, service.restarts())
        self.injections.append(
            Injection(
                fault=fault.name,
                begun=begun,
                ended=ended,
                ready_again_s=ready_again_s,
                unready=self.readiness.statuses(begun, ended),
                errors=dict(self.where.ledger.errors_between(begun, ended + AFTERMATH_S)),
                restarts=restarts,
                cause=fault.cause,
                trouble=trouble,
            )
        )

    def _hit(self, fault: Fault, begun: float) -> tuple[float | None, str]:
        """Inject a fault, hold it, take it back; return the seconds until ready again, and what went wrong."""
        trouble, over = "", None
        try:
            with fault.inject(self.where) as over:
                time.sleep(fault.hold_s)
        except Exception as error:  # the soak goes on, and reports it
            trouble = f"{type(error).__name__}: {error}"
        recovered_s = self._wait_recovered(begun, over)
        if fault.hold_s and recovered_s is not None:  # what stays for a while is not over before it is taken back
            recovered_s = self.readiness.longest_s(begun, time.monotonic())
        return recovered_s, trouble

    def _wait_recovered(self, begun: float, over: Over | None) -> float | None:
        """Seconds from the fault until the service had recovered for good; None beyond the limit."""
        failed_at: float | None = None
        limit = time.monotonic() + RECOVERY_LIMIT_S
        while time.monotonic() < limit and self.where.service.is_running():
            if (over is None or over()) and every_model_answers(self.where.service):
                now = time.monotonic()
                seen = [moment for moment in (failed_at, self.readiness.last_failure(begun, now)) if moment]
                return max(seen, default=begun) - begun
            failed_at = time.monotonic()
            time.sleep(_POLL_S)
        return None

    def _start_anew(self) -> None:
        """The soak goes on after a service that did not recover; that it had to is reported."""
        self.where.service.end()
        self.where.service.start()
        self.where.service.wait_ready()


def _added(before: dict[str, int], after: dict[str, int]) -> dict[str, int]:
    counts = {cause: after.get(cause, 0) - before.get(cause, 0) for cause in after}
    return {cause: count for cause, count in counts.items() if count > 0}


# Memory and open files of the service, read again and again: of all of it, and of each process over its life.
#
# A process takes memory while it is young: arenas, pools and caches fill up with use, and each restart begins that
# anew. What counts as a leak is therefore a matter of a process's age: memory that a process which is no longer young
# still takes. Only memory that a process has for itself is counted (USS), and the service's regions of shared memory:
# what is shared with other programs of the machine, such as libraries, looks larger whenever one of those ends.

_PERIOD_S = 2.0
GROWTH_LIMIT = 0.25
# Memory grows when its median in the last third is above that of the first third by more than both.
GROWTH_LIMIT_MB = 100.0
# Until this age a process may fill its pools: in control runs without any fault the curves are flat from then on.
YOUNG_S = 240.0
LEAK_MB_PER_MINUTE = 1.0  # of one process that is no longer young. In a day this would be 1.4 GB.
_SHORTEST_S = 120.0  # readings over less time have no meaningful slope

Reading = tuple[float, float]  # monotonic seconds, and megabytes


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
    """A thread that reads the memory of the service."""

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
        """End the thread."""
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
    """Megabyte per minute of a straight line through readings; 0 where they are of one moment."""
    if len({at for at, _ in readings}) < 2:
        return 0.0
    minutes = [at / 60 for at, _ in readings]
    return statistics.linear_regression(minutes, [mb for _, mb in readings]).slope


def by_role(lives: Iterable[Life]) -> dict[str, dict[str, Any]]:
    """Summarize memory of processes by role.

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
    """Return true if the memory of all processes grew by more than the limits."""
    added = figures["end_mb"] - figures["start_mb"]
    return added > GROWTH_LIMIT_MB and added > GROWTH_LIMIT * figures["start_mb"]


def leaking(roles: dict[str, dict[str, Any]]) -> list[str]:
    """Describe processes that still grew when they were no longer young."""
    slopes = {role: each["slope_mb_per_minute"] or 0.0 for role, each in roles.items()}
    return [f"{role} {value} MB/min" for role, value in slopes.items() if value > LEAK_MB_PER_MINUTE]
