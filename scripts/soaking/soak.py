"""Run a soak test: start servers, send traffic, inject faults, measure recovery and memory."""

from __future__ import annotations

import logging
import os
import random
import time
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from graphkiln_backend.graph.errors import GraphkilnError, MeasurementError
from graphkiln_backend.server.run_folder import environments_of
from soaking.faults import MODES, STORE, Fault, Field, Mode, Over, stage
from soaking.guard import guarded_folder, known_runs, regions_of
from soaking.models import build_store
from soaking.service import Service, every_model_answers
from soaking.traffic import Ledger, Outcome, Traffic
from soaking.watching import Memory, Readiness, by_role, growth

_INTERRUPTED = "interrupted: the report is about the time until then"


@dataclass(frozen=True, kw_only=True)
class Result:
    """Result of the soak of one mode.

    Attributes:
        mode: Name of the mode.
        seed: Random seed.
        seconds: Duration of the traffic.
        first_start_s: Seconds of the first start, until every model answered.
        counts: Number of requests by sender and verdict.
        bad: Wrong answers and lost requests.
        unexplained: Requests refused outside of faults.
        unready: Readiness failures outside of faults.
        injections: The injected faults.
        figures: Memory of all processes.
        processes: Memory of processes over their lives, by role.
        left: Leftovers after the last stop.
        stops: Exit code and seconds of each SIGTERM.
        stuck: Number of senders that did not end.
        notes: Further remarks.
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


def soak(minutes: float, seed: int, *, heavy: bool = True, keep_log: Path | None = None) -> list[Result]:
    """Soak the service in each mode.

    Args:
        minutes: Duration of fault injection, for all modes together.
        seed: Random seed.
        heavy: Include faults that restart the whole service.
        keep_log: File for the service's log.

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
            faults = made.faults(mode, heavy=heavy)
            result = _soak_service(made.service, folder, faults, minutes / len(MODES), seed, mode=mode)
        results.append(replace(result, first_start_s=first_start_s, notes=made.notes + result.notes))
        if _INTERRUPTED in result.notes:
            break
    return results


def start_service(service: Service) -> float:
    """Start a service; return the seconds until every model answered.

    Raises:
        MeasurementError: The service does not become ready.
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
    service: Service, folder: Path, faults: list[Fault], minutes: float, seed: int, *, mode: Mode
) -> Result:
    """Inject faults under traffic until the time is over, and stop the service."""
    ledger = Ledger()
    traffic = Traffic(service, ledger, seed)
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
    )


def _is_outside(outcome: Outcome, windows: list[tuple[float, float]]) -> bool:
    return all(outcome.ended < begin or outcome.begun > end for begin, end in windows)


def leftovers(service: Service) -> list[str]:
    """List processes, temporary files and shared-memory regions left by the stopped service."""
    files = [str(path.relative_to(service.temporary)) for path in sorted(service.temporary.iterdir())]
    runs = known_runs(service.temporary)
    regions = [path.name for path in regions_of(os.getpid(), runs)]
    environments = [str(path) for run in sorted(runs) for path in environments_of(run)]
    return [*files, *regions, *environments, *(f"process {process.pid}" for process in service.tree()[1:])]


# Fault injection, one fault at a time, with the recovery time of each.

_log = logging.getLogger("graphkiln.soak")

# Recovery limit; generous, because the machine is shared with the load generator.
RECOVERY_LIMIT_S = 60.0
# Errors so soon after a recovery still belong to the fault: retries, broken connections.
AFTERMATH_S = 3.0
_POLL_S = 0.05
# With the aftermath, more than the 5 s of service that earn one restart; otherwise the supervisor would give up.
_QUIET_S = (4.0, 8.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Injection:
    """An injected fault and its effects.

    Attributes:
        fault: Name of the fault.
        begun: Time of injection; monotonic seconds.
        ended: Time of recovery or of giving up.
        ready_again_s: Seconds until the service stayed ready and every model answered correctly over both protocols;
            0 if it was never unready; None beyond the limit. For a fault that lasts, the longest time without
            readiness.
        unready: Count of readiness statuses other than 200, polled ten times a second.
        errors: Errors seen by clients.
        restarts: Increase of the restart metric, by cause.
        cause: Expected cause of a restart; empty for none.
        trouble: Why the fault could not be injected, or the soak had to restart the service.
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
        """Inject faults until a time, in rounds in which each kind occurs once."""
        while time.monotonic() < until:
            time.sleep(self.where.chance.uniform(*_QUIET_S))
            if time.monotonic() < until:
                self._inject(self._choose())

    def windows(self) -> list[tuple[float, float]]:
        """Intervals in which errors are expected."""
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
        """Inject, hold and undo a fault; return the recovery time and any trouble."""
        trouble, over = "", None
        try:
            with fault.inject(self.where) as over:
                time.sleep(fault.hold_s)
        except Exception as error:  # reported; the soak continues
            trouble = f"{type(error).__name__}: {error}"
        recovered_s = self._wait_recovered(begun, over)
        if fault.hold_s and recovered_s is not None:  # a lasting fault ends when it is undone
            recovered_s = self.readiness.longest_s(begun, time.monotonic())
        return recovered_s, trouble

    def _wait_recovered(self, begun: float, over: Over | None) -> float | None:
        """Wait for recovery; return the seconds since the fault, or None beyond the limit."""
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
        """Restart a service that did not recover, so that the soak can continue."""
        self.where.service.end()
        self.where.service.start()
        self.where.service.wait_ready()


def _added(before: dict[str, int], after: dict[str, int]) -> dict[str, int]:
    counts = {cause: after.get(cause, 0) - before.get(cause, 0) for cause in after}
    return {cause: count for cause, count in counts.items() if count > 0}
