"""A run, from the request to the summary."""

from __future__ import annotations

import secrets
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from graphkiln_backend.cache.settings import CacheSettings
from graphkiln_backend.scoring.cluster import connect
from graphkiln_backend.scoring.destinations.base import Destination, Lease
from graphkiln_backend.scoring.errors import ClaimLost, RunInterrupted, ScoringError
from graphkiln_backend.scoring.events import Report, RunFinished, RunPlanned, Summary
from graphkiln_backend.scoring.fleet import RayFleet
from graphkiln_backend.scoring.model import read_model
from graphkiln_backend.scoring.model_fetch import with_local_model
from graphkiln_backend.scoring.opening import open_destination, open_source
from graphkiln_backend.scoring.outcomes import Fleet
from graphkiln_backend.scoring.plan import PlanTotals, read_plan, write_plan
from graphkiln_backend.scoring.request import ScoreRequest
from graphkiln_backend.scoring.schedule import Schedule
from graphkiln_backend.scoring.scratch import Scratch, remove_dead_scratch, scratch_folder
from graphkiln_backend.scoring.units import InputRange, Unit
from graphkiln_backend.system.resources import usable_cores
from graphkiln_backend.system.stop_signals import raising_once

# Ends a run in order when a signal asks for it.

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextmanager
def interruptible() -> Iterator[None]:
    """Within the block Ctrl-C, SIGTERM and SIGHUP raise `RunInterrupted`, once: what follows no second one disturbs.

    SIGHUP comes when a terminal is closed, and stays ignored where `nohup` asked for that.
    In another thread than the main one nothing changes: signals do not come there.
    """
    try:
        with raising_once(_SIGNALS, RunInterrupted):
            yield
    except SystemError as error:  # what compiled code that returns although its caller was interrupted becomes
        if isinstance(error.__cause__, RunInterrupted):
            raise error.__cause__ from None
        raise


# Gives units to workers until each is committed.

_WAIT_S = 0.5


def drive(
    schedule: Schedule, fleet: Fleet, stay: Callable[[], None], clock: Callable[[], float] = time.monotonic
) -> None:
    """Brings a schedule to its end.

    Args:
        schedule: What is to be done.
        fleet: Who does it.
        stay: Called at least each second: what must be done for the run to stay the only one.
        clock: Seconds that only grow.

    Raises:
        ScoringError: No worker can be had, or going on makes no sense.
    """
    while not schedule.is_over:
        stay()
        for worker in schedule.workers:
            while (work := schedule.take(worker, clock())) is not None:
                fleet.assign(worker, *work)
        if schedule.is_over:
            return
        for outcome in fleet.wait(_WAIT_S):
            schedule.handle(outcome, clock())


# What the driver of a run knows of its model, read once, before the destination is touched; workers read it again.


@dataclass(frozen=True, kw_only=True, slots=True)
class RunModel:
    """The model of a run.

    Attributes:
        request: The run, with the number of its version.
        configuration: Digest of all that changes an answer.
        on_gpu: Whether it runs on a GPU where there is one.
    """

    request: ScoreRequest
    configuration: str
    on_gpu: bool


def read_run_model(request: ScoreRequest, folder: Path) -> RunModel:
    """Fetches and reads the model of a run.

    A graph of another framework is converted into the run's own cache, where workers of this machine find it.

    Args:
        request: The run.
        folder: For what is fetched, and for a cache that vanishes.

    Raises:
        GraphkilnError: There is no such version, it does not say how an image becomes its input, or it has no output of
            a name that is given.
    """
    with CacheSettings(folder=request.cache).checked().open(folder / "cache") as cache:
        local = with_local_model(request, folder)
        model = read_model(local, cache, usable_cores())
        model.encoder(local)
        return RunModel(
            request=replace(request, version=local.version),
            configuration=model.configuration(request),
            on_gpu=model.wants_gpu,
        )


# A claim is renewed while the driver waits in one call: for a listing, or for thousands of removals.

_ASKED_S = 1.0


@contextmanager
def kept(lease: Lease) -> Iterator[Callable[[], None]]:
    """Renews a lease, and again in a thread of its own as long as a block runs, which does not renew it itself.

    Args:
        lease: What is kept.

    Yields:
        To be called before something is done that no other run may do: raises what ended the lease, if anything did.

    Raises:
        ClaimLost: Another run took it over meanwhile.
        StoreError: It could not be renewed for so long that it has ended.
    """
    over, ended = threading.Event(), Future[None]()

    def check() -> None:
        if ended.done():
            ended.result()

    lease.renew()
    thread = threading.Thread(target=_renew, args=(lease, over, ended), name="lease", daemon=True)
    thread.start()
    try:
        yield check
    finally:
        over.set()
        thread.join()
    check()


def _renew(lease: Lease, over: threading.Event, ended: Future[None]) -> None:
    try:
        while not over.wait(_ASKED_S):
            lease.renew()
    except BaseException as error:  # noqa: BLE001 - raised where it is asked for
        ended.set_exception(error)


# What a destination holds already, beside what a run plans: what is done, and what has no place in the plan.

_TOLD = 3  # units that a message names
_PIECE = 1000  # units that are removed between two looks at the claim


@dataclass(frozen=True, kw_only=True, slots=True)
class Standing:
    """Where a run stands.

    Attributes:
        committed: Ids of all units that have a result.
        done_units: Those of them that are planned.
        done_rows: Their rows.
        stale: Ids of those that are not.
    """

    committed: frozenset[str]
    done_units: int
    done_rows: int
    stale: frozenset[str]


def read_standing(destination: Destination, plan: Path) -> Standing:
    """Lists a destination once and goes through a plan once.

    Args:
        destination: Where results are.
        plan: The file of the plan.
    """
    committed = frozenset(destination.committed_ids())
    stale, units, rows = set(committed), 0, 0
    for unit in read_plan(plan):
        if unit.id in committed:
            units, rows = units + 1, rows + unit.rows
            stale.discard(unit.id)
    return Standing(committed=committed, done_units=units, done_rows=rows, stale=frozenset(stale))


def settle_stale(
    destination: Destination,
    stale: frozenset[str],
    configuration: str,
    *,
    replace: bool,
    check: Callable[[], None] = lambda: None,
) -> None:
    """Refuses, or removes, results that are not of this run's input.

    Args:
        destination: Where they are.
        stale: Their ids.
        configuration: Of this run.
        replace: Whether those of an input that changed are removed.
        check: Raises where the destination is another run's by now; asked before each piece is removed.

    Raises:
        ScoringError: They are of another model or other settings, or must not be removed.
    """
    if not stale:
        return
    others = {each.configuration for each in destination.describe(stale) if not each.damage} - {configuration}
    if others:
        raise ScoringError(
            "the destination holds results of another model, another version or other settings",
            hint="results of two are never mixed: name another destination for this run",
        )
    if not replace:
        raise ScoringError(
            f"the destination holds {len(stale)} units that are not part of this input: files have changed or are "
            "gone, or units were cut otherwise",
            hint="--replace removes their rows and scores what took their place",
        )
    remaining = sorted(stale)
    for begin in range(0, len(remaining), _PIECE):
        check()
        destination.remove(remaining[begin : begin + _PIECE])


def account(destination: Destination, plan: Path, reasons: Mapping[str, str]) -> None:
    """Checks that the destination has a result of every unit that is planned, and no other one.

    What is in a unit needs no second look: a worker commits it only with all of its rows, and in one step.

    Args:
        destination: Where results are; listed anew.
        plan: The file of the plan.
        reasons: Why units have no result, by their ids, where that is known.

    Raises:
        ScoringError: Some have none, or there are others.
    """
    committed = set(destination.committed_ids())
    missing: list[Unit] = []
    count = rows = 0
    for unit in read_plan(plan):
        if unit.id in committed:
            committed.discard(unit.id)
            continue
        count, rows = count + 1, rows + unit.rows
        if len(missing) < _TOLD:
            missing.append(unit)
    if count:
        told = "; ".join(
            f"unit {each.id} of {each.path}: {reasons.get(each.id, 'its result is gone')}" for each in missing
        )
        raise ScoringError(
            f"{count} units ({rows} rows) have no result: {told}",
            hint="all others have theirs; run the same command to try these again",
        )
    if committed:
        raise ScoringError(f"{len(committed)} units have a result that nobody planned: does another run write there?")


PLAN = "_plan.parquet"

# Writes what a run leaves beside its results, while the destination is still its own; renews the lease meanwhile.
# Given the error that ends the run, or None where every row is accounted for.
Conclude = Callable[[Destination, Lease, BaseException | None], None]


def score(request: ScoreRequest, report: Report = lambda _: None, conclude: Conclude = lambda *_: None) -> Summary:
    """Scores a data set. It returns only when every row of the input is accounted for in the destination.

    Args:
        request: What to score, with what, and where the answers go.
        report: Told what happens.
        conclude: Called once, when the destination was claimed and unless another run took it over.

    Raises:
        RunInterrupted: Ctrl-C or SIGTERM, in the main thread.
        GraphkilnError: The run cannot be finished; the same request goes on. A mistake in the model is told before the
            destination is touched.
    """
    run_id = secrets.token_hex(4)
    remove_dead_scratch()
    with interruptible(), scratch_folder(Scratch.PLAN) as folder:
        model = read_run_model(request, folder.path)
        destination = open_destination(request)
        destination.prepare()
        lease = destination.claim(run_id)
        try:
            planning = _Planning(model=model, destination=destination, lease=lease, run_id=run_id, report=report)
            with _concluded(destination, lease, conclude):
                summary = planning.plan(folder.path).finish()
        finally:
            lease.release()
    report(RunFinished(summary=summary))
    return summary


@contextmanager
def _concluded(destination: Destination, lease: Lease, conclude: Conclude) -> Iterator[None]:
    try:
        yield
    except ClaimLost:  # what stands beside the results is another run's now
        raise
    except BaseException as error:
        conclude(destination, lease, error)
        raise
    conclude(destination, lease, None)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Run:
    """A run that is planned."""

    model: RunModel
    destination: Destination
    lease: Lease
    plan: Path
    totals: PlanTotals
    standing: Standing
    report: Report

    def finish(self) -> Summary:
        """Scores what is left, and checks the destination."""
        totals, done = self.totals, self.standing.done_units
        summary = Summary(units=totals.units, rows=totals.rows, done_before=done)
        schedule = Schedule(self._open_units(), self.report, summary)
        if done < totals.units:
            self._score(schedule)
        with kept(self.lease):
            account(self.destination, self.plan, {each.unit_id: each.reason for each in schedule.failed})
        return summary

    def _score(self, schedule: Schedule) -> None:
        model = self.model
        with (
            connect(model.request.address),
            interruptible(),  # once more: Ray has put its own handler of SIGTERM in the place of ours
            RayFleet(model.request, model.configuration, on_gpu=model.on_gpu, tell=self.report) as fleet,
        ):
            drive(schedule, fleet, self.lease.renew)

    def _open_units(self) -> Iterator[Unit]:
        return (unit for unit in read_plan(self.plan) if unit.id not in self.standing.committed)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Planning:
    """A run whose destination is claimed."""

    model: RunModel
    destination: Destination
    lease: Lease
    run_id: str
    report: Report

    def plan(self, folder: Path) -> _Run:
        """Lists the source, and sees what is done already."""
        request, configuration = self.model.request, self.model.configuration
        destination, plan = self.destination, folder / PLAN
        totals = write_plan(plan, _held(open_source(request).ranges(request.rows_per_unit), self.lease), configuration)
        with kept(self.lease) as check:
            standing = read_standing(destination, plan)
            settle_stale(destination, standing.stale, configuration, replace=request.replace, check=check)
            check()
            destination.write_note(PLAN, plan)
        self._tell(configuration, totals, standing)
        return _Run(
            model=self.model,
            destination=destination,
            lease=self.lease,
            plan=plan,
            totals=totals,
            standing=standing,
            report=self.report,
        )

    def _tell(self, configuration: str, totals: PlanTotals, standing: Standing) -> None:
        self.report(
            RunPlanned(
                run_id=self.run_id,
                configuration=configuration,
                units=totals.units,
                rows=totals.rows,
                size_bytes=totals.size_bytes,
                done_units=standing.done_units,
                done_rows=standing.done_rows,
                removed_units=len(standing.stale),
            )
        )


def _held(ranges: Iterable[InputRange], lease: Lease) -> Iterator[InputRange]:
    """The same ranges; listing many must not cost the claim."""
    for found in ranges:
        lease.renew()
        yield found
