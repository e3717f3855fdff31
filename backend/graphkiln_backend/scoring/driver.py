"""A run: read the model, lock the destination, plan, score what is left, account for every row.

`graphkiln.scoring.running` calls `score_data_set`, after it has looked for mistakes in the request.

A driver that is killed takes its workers along: they are actors of its Ray job. The next run waits until the lock has
expired (`destinations.lock`; not for a process of this machine that is gone), removes scratch folders of dead runs
(`scratch`), plans anew and skips the units that are committed (`plan`). A commit that is still under way then harms
nothing: a result is written under the unit's id once, and the second of two attempts is refused.
"""

from __future__ import annotations

import secrets
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from graphkiln_backend.cache.settings import CacheSettings
from graphkiln_backend.scoring.cluster import connect
from graphkiln_backend.scoring.destinations.base import Destination
from graphkiln_backend.scoring.destinations.lock import Lock
from graphkiln_backend.scoring.errors import ClaimLost, RunInterrupted
from graphkiln_backend.scoring.fleet import RayFleet
from graphkiln_backend.scoring.messages import Attempt, Outcome, Report, RunFinished, RunPlanned
from graphkiln_backend.scoring.model import read_model, with_local_model
from graphkiln_backend.scoring.opening import open_destination, open_source
from graphkiln_backend.scoring.plan import PLAN, account, read_plan, read_resume_state, settle_stale, write_plan
from graphkiln_backend.scoring.request import ScoreRequest
from graphkiln_backend.scoring.schedule import Schedule
from graphkiln_backend.scoring.scratch import Scratch, remove_dead_scratch, scratch_folder
from graphkiln_backend.scoring.units import InputRange
from graphkiln_backend.system.resources import usable_cores
from graphkiln_backend.system.signals import raising_once

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_WAIT_S = 0.5

# Writes the notes that a run leaves beside its results, while the destination is still locked. Called with the error
# that ends the run, or None where every row is accounted for.
WriteNotes = Callable[[Destination, Lock, BaseException | None], None]


def score_data_set(
    request: ScoreRequest, report: Report = lambda _: None, write_notes: WriteNotes = lambda *_: None
) -> None:
    """Score a data set. Returns only when every row of the input is accounted for in the destination.

    Args:
        request: What to score, with what, and where the answers go.
        report: Called with what happens.
        write_notes: Called once, when the destination was locked and unless another run took it over.

    Raises:
        RunInterrupted: Ctrl-C or SIGTERM, in the main thread.
        GraphkilnError: The run cannot be finished; the same request goes on. A mistake in the model raises before the
            destination is touched.
    """
    run_id = secrets.token_hex(4)
    remove_dead_scratch()
    with interruptible(), scratch_folder(Scratch.PLAN) as folder:
        model = read_run_model(request, folder.path)
        destination = open_destination(request)
        destination.prepare()
        with destination.claim(run_id) as lock, _leaving_notes(destination, lock, write_notes):
            _score(model, destination, lock, folder.path / PLAN, run_id=run_id, report=report)
    report(RunFinished())


def _score(model: RunModel, destination: Destination, lock: Lock, plan: Path, *, run_id: str, report: Report) -> None:
    """Plan, score what has no result yet, and check the destination."""
    request, configuration = model.request, model.configuration
    totals = write_plan(plan, _checked(open_source(request).ranges(request.rows_per_unit), lock), configuration)
    state = read_resume_state(destination, plan)
    settle_stale(destination, state.stale, configuration, replace=request.replace, check=lock.check)
    lock.check()
    destination.notes.replace(PLAN, plan)
    report(
        RunPlanned(
            run_id=run_id,
            configuration=configuration,
            units=totals.units,
            rows=totals.rows,
            size_bytes=totals.size_bytes,
            done_units=state.done_units,
            done_rows=state.done_rows,
            removed_units=len(state.stale),
        )
    )
    units = (unit for unit in read_plan(plan) if unit.id not in state.committed)
    schedule = Schedule(units, report)
    if state.done_units < totals.units:
        with (
            connect(request.address),
            interruptible(),  # once more: Ray has put its own handler of SIGTERM in the place of ours
            RayFleet(request, configuration, on_gpu=model.on_gpu, report=report) as fleet,
        ):
            drive(schedule, fleet, lock.check)
    account(destination, plan, {each.unit_id: each.reason for each in schedule.failed})
    lock.check()


class Fleet(Protocol):
    """Workers, wherever they are: `RayFleet` on a cluster."""

    def assign(self, worker: str, number: int, attempt: Attempt) -> None:
        """Give a worker that is ready an attempt; outcomes have its number."""
        ...

    def wait(self, timeout_s: float, patience_s: float) -> Sequence[Outcome]:
        """Return what has happened since, and replace workers meanwhile.

        Args:
            timeout_s: How long to wait for something to happen.
            patience_s: Seconds without progress after which a worker that has attempts hangs.

        Raises:
            ScoringError: No worker can be had.
        """
        ...


def drive(
    schedule: Schedule, fleet: Fleet, check: Callable[[], None], clock: Callable[[], float] = time.monotonic
) -> None:
    """Give units to workers until each is committed or has failed for good.

    Args:
        schedule: What is to be done.
        fleet: The workers.
        check: Raises where the lock of the destination is lost; called twice a second at least.
        clock: Seconds that only grow.

    Raises:
        ScoringError: No worker can be had, or going on makes no sense.
    """
    while not schedule.is_over:
        check()
        for worker in schedule.workers:
            while (work := schedule.take(worker, clock())) is not None:
                fleet.assign(worker, *work)
        if schedule.is_over:
            return
        for outcome in fleet.wait(_WAIT_S, schedule.patience_s):
            schedule.handle(outcome, clock())


@dataclass(frozen=True, kw_only=True, slots=True)
class RunModel:
    """The model of a run, read once before the destination is touched; workers read it again.

    Attributes:
        request: The run, with the number of its version.
        configuration: Digest of all that changes an answer.
        on_gpu: Whether it runs on a GPU where there is one.
    """

    request: ScoreRequest
    configuration: str
    on_gpu: bool


def read_run_model(request: ScoreRequest, folder: Path) -> RunModel:
    """Fetch and read the model of a run.

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


@contextmanager
def interruptible() -> Iterator[None]:
    """Raise `RunInterrupted` in the block at Ctrl-C, SIGTERM or SIGHUP, once: no second signal disturbs the way out.

    SIGHUP comes when a terminal is closed, and stays ignored where `nohup` asked for that.
    In another thread than the main one nothing changes: signals do not come there.
    """
    try:
        with raising_once(_SIGNALS, RunInterrupted):
            yield
    except SystemError as error:  # raised by compiled code that returns although its caller was interrupted
        if isinstance(error.__cause__, RunInterrupted):
            raise error.__cause__ from None
        raise


@contextmanager
def _leaving_notes(destination: Destination, lock: Lock, write_notes: WriteNotes) -> Iterator[None]:
    """Write the notes when the block ends or fails, unless another run took the destination over."""
    try:
        yield
    except ClaimLost:  # the notes beside the results are another run's now
        raise
    except BaseException as error:
        write_notes(destination, lock, error)
        raise
    write_notes(destination, lock, None)


def _checked(ranges: Iterable[InputRange], lock: Lock) -> Iterator[InputRange]:
    for found in ranges:
        lock.check()
        yield found
