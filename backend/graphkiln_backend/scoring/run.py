"""A run, from the request to the summary."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from graphkiln_backend.scoring.cluster import connect
from graphkiln_backend.scoring.destinations.base import Destination, Lease
from graphkiln_backend.scoring.driver import drive
from graphkiln_backend.scoring.errors import ClaimLost
from graphkiln_backend.scoring.events import Report, RunFinished, RunPlanned, Summary
from graphkiln_backend.scoring.fleet import RayFleet
from graphkiln_backend.scoring.keeping import kept
from graphkiln_backend.scoring.opening import open_destination, open_source
from graphkiln_backend.scoring.plan import PlanTotals, read_plan, replace_units, write_plan
from graphkiln_backend.scoring.request import ScoreRequest
from graphkiln_backend.scoring.resume import Standing, account, read_standing, settle_stale
from graphkiln_backend.scoring.run_model import RunModel, read_run_model
from graphkiln_backend.scoring.schedule import Schedule
from graphkiln_backend.scoring.scratch import Scratch, remove_dead_scratch, scratch_folder
from graphkiln_backend.scoring.sources.base import Source
from graphkiln_backend.scoring.stopping import interruptible
from graphkiln_backend.scoring.units import InputRange, Unit

PLAN = "_plan.parquet"

Conclude = Callable[[Destination, Lease, BaseException | None], None]
"""Writes what a run leaves beside its results, while the destination is still its own; renews the lease meanwhile.
Given the error that ends the run, or None where every row is accounted for."""


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
    source: Source
    lease: Lease
    plan: Path
    totals: PlanTotals
    standing: Standing
    report: Report

    def finish(self) -> Summary:
        """Scores what is left, and checks the destination."""
        totals, done = self.totals, self.standing.done_units
        summary = Summary(units=totals.units, rows=totals.rows, done_before=done)
        schedule = Schedule(self._open_units(), self._replan, self.report, summary)
        if done < totals.units:
            self._score(schedule)
        with kept(self.lease) as check:
            if schedule.replaced:
                replace_units(self.plan, schedule.replaced)
                check()
                self.destination.write_note(PLAN, self.plan)
            reasons = {each.unit_id: each.reason for each in schedule.failed}
            account(self.destination, self.plan, schedule.replaced, reasons)
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

    def _replan(self, unit: Unit) -> Iterable[Unit]:
        return (found.unit(self.model.configuration) for found in self.source.replan(unit))


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
        source = open_source(request)
        totals = write_plan(plan, _held(source.ranges(request.rows_per_unit), self.lease), configuration)
        with kept(self.lease) as check:
            standing = read_standing(destination, plan)
            settle_stale(destination, standing.stale, configuration, replace=request.replace, check=check)
            check()
            destination.write_note(PLAN, plan)
        self._tell(configuration, totals, standing)
        return _Run(
            model=self.model,
            destination=destination,
            source=source,
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
