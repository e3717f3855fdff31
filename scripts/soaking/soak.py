"""A soak: a server made on the spot, traffic of all kinds, faults, and a report."""

from __future__ import annotations

import os
import random
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from graphkiln_backend.graph.errors import GraphkilnError, MeasurementError
from soaking.fault import Fault, Field
from soaking.guard import Guard, known_runs, regions_of
from soaking.hostile import hostile_requests
from soaking.injector import Injection, Injector
from soaking.ledger import Ledger, Outcome
from soaking.memory import Memory, growth
from soaking.models import build_store
from soaking.process_faults import Terminate, process_faults
from soaking.readiness import Readiness, every_model_answers
from soaking.service import Service
from soaking.store_faults import FullCache, GoodVersion, cache_folder, small_disk, store_faults
from soaking.traffic import Traffic

STORE = "store"
LIMIT_FLAGS = ("--compute-limit=10",)
"""Below the deadline of a request, so that one that would compute for ever gets an error before."""
POLL_FLAGS = ("--model-control-mode=poll", "--repository-poll-secs=1", *LIMIT_FLAGS)


@dataclass(frozen=True, kw_only=True)
class Result:
    """What a soak has seen.

    Attributes:
        seed: Of all random choices.
        seconds: How long traffic ran.
        first_start_s: Seconds of the first start, until every model answered.
        counts: Number of requests by sender and verdict.
        bad: Wrong answers and lost requests.
        unexplained: Requests refused while no fault was at work.
        unready: How often readiness failed while no fault was at work.
        injections: The faults.
        figures: Memory.
        left: What the last stop left behind.
        stops: Exit code and seconds of each SIGTERM.
        stuck: Senders that did not end.
        notes: What else is to be known.
    """

    seed: int
    seconds: float
    first_start_s: float
    counts: dict[str, dict[str, int]]
    bad: list[Outcome]
    unexplained: list[Outcome]
    unready: int
    injections: list[Injection]
    figures: dict[str, float]
    left: list[str]
    stops: list[tuple[int, float]]
    stuck: int
    notes: list[str]


@contextmanager
def soak_folder() -> Iterator[Path]:
    """A folder under guard: whatever happens, it is removed and every process that belongs to it is ended."""
    folder = Path(tempfile.mkdtemp(prefix="soak-"))
    try:
        with Guard(folder):
            yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def soak(minutes: float, seed: int, *, heavy: bool = True, keep_log: Path | None = None) -> Result:
    """Runs a soak.

    Args:
        minutes: How long faults are injected.
        seed: Of all random choices.
        heavy: Whether faults that restart the service are among them.
        keep_log: Where the service's log is copied to.

    Raises:
        MeasurementError: The service could not be started.
    """
    with ExitStack() as stack:
        folder = stack.enter_context(soak_folder())
        has_disk = stack.enter_context(small_disk(folder))
        build_store(folder / STORE)
        environment = {"GRAPHKILN_CACHE": str(cache_folder(folder))}
        service = Service(folder, folder / STORE, *POLL_FLAGS, environment=environment)
        stack.callback(service.end)
        if keep_log:
            stack.callback(service.copy_log, keep_log)
        first_start_s = start_service(service)
        faults = choose_faults(heavy=heavy, has_disk=has_disk)
        result = _run(folder, service, faults, minutes=minutes, seed=seed)
    notes = [] if has_disk else ["no disk of its own could be mounted for the cache: it was never full"]
    return replace(result, first_start_s=first_start_s, notes=result.notes + notes)


def choose_faults(*, heavy: bool, has_disk: bool) -> list[Fault]:
    """Every kind of fault that can be injected here."""
    faults = [*process_faults(), *store_faults(), *hostile_requests()]
    if has_disk:
        faults.append(FullCache())
    return [fault for fault in faults if heavy or not fault.heavy]


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


def _run(folder: Path, service: Service, faults: list[Fault], *, minutes: float, seed: int) -> Result:
    ledger = Ledger()
    traffic = Traffic(service, ledger, seed)
    where = Field(
        service=service,
        folder=folder,
        store=folder / STORE,
        versions=traffic.versions,
        ledger=ledger,
        chance=random.Random(seed),
    )
    notes: list[str] = []
    begun = time.monotonic()
    with Readiness(service) as readiness, Memory(service) as memory:
        traffic.start()
        injector = Injector(where=where, readiness=readiness, faults=faults)
        try:
            injector.run(begun + minutes * 60)
        except KeyboardInterrupt:
            notes.append("interrupted: the report is about the time until then")
        except GraphkilnError as error:
            notes.append(f"ended early: {error}")
        stuck = traffic.stop()
    seconds = time.monotonic() - begun
    windows = injector.windows()
    stops = [end for fault in faults if isinstance(fault, Terminate) for end in fault.ends]
    live_s = [seconds for fault in faults if isinstance(fault, GoodVersion) for seconds in fault.live_s]
    if live_s:
        notes.append(f"good versions: {len(live_s)}, live after {max(live_s):.1f} s at worst")
    with suppress(Exception):
        stops.append(service.stop())
    return Result(
        seed=seed,
        seconds=seconds,
        first_start_s=0.0,
        counts=ledger.counts(),
        bad=ledger.failures("wrong", "lost"),
        unexplained=[outcome for outcome in ledger.failures("refused") if _is_outside(outcome, windows)],
        unready=readiness.failures_outside(windows),
        injections=injector.injections,
        figures=growth(memory.samples) if memory.samples else {},
        left=leftovers(service),
        stops=stops,
        stuck=stuck,
        notes=notes,
    )


def _is_outside(outcome: Outcome, windows: list[tuple[float, float]]) -> bool:
    return all(outcome.ended < begin or outcome.begun > end for begin, end in windows)


def leftovers(service: Service) -> list[str]:
    """Processes, temporary files and shared-memory regions that the stopped service has left."""
    files = [str(path.relative_to(service.temporary)) for path in sorted(service.temporary.iterdir())]
    regions = [path.name for path in regions_of(os.getpid(), known_runs(service.temporary))]
    return [*files, *regions, *(f"process {process.pid}" for process in service.tree()[1:])]
