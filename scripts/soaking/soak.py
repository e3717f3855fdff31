"""A soak: servers made on the spot, traffic of all kinds, faults, and a report."""

from __future__ import annotations

import os
import random
import time
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from graphkiln_backend.graph.errors import GraphkilnError, MeasurementError
from graphkiln_backend.server.triton_folders import environments_of
from soaking.fault import Fault, Field
from soaking.guard import guarded_folder, known_runs, regions_of
from soaking.injector import Injection, Injector
from soaking.ledger import Ledger, Outcome
from soaking.memory import Memory, by_role, growth
from soaking.models import build_store
from soaking.modes import MODES, STORE, Mode, stage
from soaking.process_faults import Terminate
from soaking.readiness import Readiness, every_model_answers
from soaking.service import Service
from soaking.store_faults import GoodVersion
from soaking.traffic import Traffic

Only = Literal["", "traffic", "faults"]
"""Control runs: traffic without faults, or faults without traffic."""
_INTERRUPTED = "interrupted: the report is about the time until then"


@dataclass(frozen=True, kw_only=True)
class Result:
    """What the soak of one mode has seen.

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
    first_start_s: float
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
    """Soaks the service in each mode.

    Args:
        minutes: How long faults are injected, in all modes together.
        seed: Of all random choices.
        heavy: Whether faults that restart the service are among them.
        keep_log: Where the services' logs are copied to.
        only: For a control run.

    Raises:
        MeasurementError: A service could not be started.
    """
    results: list[Result] = []
    if keep_log:
        keep_log.write_bytes(b"")
    for mode in MODES:
        plan = _Plan(mode=mode, minutes=minutes / len(MODES), seed=seed, heavy=heavy, only=only)
        results.append(_soak_mode(plan, keep_log))
        if _INTERRUPTED in results[-1].notes:
            break
    return results


@dataclass(frozen=True, kw_only=True)
class _Plan:
    """What is to be done in one mode."""

    mode: Mode
    minutes: float
    seed: int
    heavy: bool
    only: Only


def _soak_mode(plan: _Plan, keep_log: Path | None) -> Result:
    with ExitStack() as stack:
        folder = stack.enter_context(guarded_folder("soak-"))
        build_store(folder / STORE)
        made = stack.enter_context(stage(folder, plan.mode))
        if keep_log:
            stack.callback(made.service.append_log, keep_log)
        first_start_s = start_service(made.service)
        faults = [] if plan.only == "traffic" else made.faults(plan.mode, heavy=plan.heavy)
        return _Run(folder, made.service, plan).run(faults, first_start_s, made.notes)


def start_service(service: Service) -> float:
    """Starts a service; returns the seconds until every model answered.

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


class _Run:
    """A service under traffic and faults."""

    def __init__(self, folder: Path, service: Service, plan: _Plan) -> None:
        self._service = service
        self._plan = plan
        self._ledger = Ledger()
        self._traffic = Traffic(service, self._ledger, plan.seed, senders=0 if plan.only == "faults" else None)
        self._where = Field(
            service=service,
            folder=folder,
            store=folder / STORE,
            versions=self._traffic.versions,
            ledger=self._ledger,
            chance=random.Random(plan.seed),
            explicit=plan.mode.explicit,
        )

    def run(self, faults: list[Fault], first_start_s: float, notes: list[str]) -> Result:
        """Injects faults until the time is over, and stops the service."""
        begun = time.monotonic()
        with Readiness(self._service) as readiness, Memory(self._service) as memory:
            self._traffic.start()
            injector = Injector(where=self._where, readiness=readiness, faults=faults)
            notes = notes + self._inject(injector, begun + self._plan.minutes * 60)
            stuck = self._traffic.stop()
        seconds = time.monotonic() - begun
        windows = injector.windows()
        stops = [end for fault in faults if isinstance(fault, Terminate) for end in fault.ends]
        with suppress(Exception):
            stops.append(self._service.stop())
        refused = self._ledger.failures("refused")
        return Result(
            mode=self._plan.mode.name,
            seed=self._plan.seed,
            seconds=seconds,
            first_start_s=first_start_s,
            counts=self._ledger.counts(),
            bad=self._ledger.failures("wrong", "lost"),
            unexplained=[outcome for outcome in refused if _is_outside(outcome, windows)],
            unready=[lapse.describe(begun) for lapse in readiness.lapses_outside(windows)],
            injections=injector.injections,
            figures=growth(memory.samples) if memory.samples else {},
            processes=by_role(memory.lives.values()),
            left=leftovers(self._service),
            stops=stops,
            stuck=stuck,
            notes=notes + _live_times(faults),
            only=self._plan.only,
        )

    def _inject(self, injector: Injector, until: float) -> list[str]:
        try:
            injector.run(until)
        except KeyboardInterrupt:
            return [_INTERRUPTED]
        except GraphkilnError as error:
            return [f"ended early: {error}"]
        return []


def _live_times(faults: list[Fault]) -> list[str]:
    live_s = [seconds for fault in faults if isinstance(fault, GoodVersion) for seconds in fault.live_s]
    return [f"good versions: {len(live_s)}, live after {max(live_s):.1f} s at worst"] if live_s else []


def _is_outside(outcome: Outcome, windows: list[tuple[float, float]]) -> bool:
    return all(outcome.ended < begin or outcome.begun > end for begin, end in windows)


def leftovers(service: Service) -> list[str]:
    """Processes, temporary files and shared-memory regions that the stopped service has left."""
    files = [str(path.relative_to(service.temporary)) for path in sorted(service.temporary.iterdir())]
    runs = known_runs(service.temporary)
    regions = [path.name for path in regions_of(os.getpid(), runs)]
    environments = [str(path) for run in sorted(runs) for path in environments_of(run)]
    return [*files, *regions, *environments, *(f"process {process.pid}" for process in service.tree()[1:])]
