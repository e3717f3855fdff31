"""A scoring run: read the model, lock the destination, plan, score what is left, account for every row.

`graphkiln.scoring.running` calls `score_data_set` after it has checked the request. The docstring of the package
`graphkiln_backend.scoring` names the order in which to read its modules.

If a driver is killed, its workers end. The next run is refused until the lock has expired, unless the dead driver
ran on the same machine (see `destinations.lock`). It removes temporary folders of dead runs, writes a new plan and
skips the units that are committed. A commit that is still in progress does no harm: a unit gets one result, and the
destination refuses a second one.
"""

from __future__ import annotations

import logging
import secrets
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pyarrow as pa

from graphkiln_backend.graph.errors import GraphkilnError
from graphkiln_backend.scoring.destinations.base import Destination
from graphkiln_backend.scoring.destinations.lock import Lock
from graphkiln_backend.scoring.errors import LockLost, RunInterrupted
from graphkiln_backend.scoring.fleet import Fleet, Machines
from graphkiln_backend.scoring.local_machine import LocalMachine
from graphkiln_backend.scoring.messages import InputRange, Report, RunFinished, RunPlanned, ScoreRequest
from graphkiln_backend.scoring.model import ScoringModel, read_run_model
from graphkiln_backend.scoring.plan import (
    PLAN,
    SNAPSHOT,
    check_complete,
    note_snapshot,
    open_destination,
    open_source,
    pin_snapshot,
    read_plan,
    read_resume_state,
    remove_stale,
    write_plan,
)
from graphkiln_backend.scoring.schedule import Schedule
from graphkiln_backend.scoring.scorer import result_schema
from graphkiln_backend.scoring.scratch import Scratch, remove_dead_scratch, scratch_folder
from graphkiln_backend.system.signals import raising_once

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_WAIT_S = 0.5
_log = logging.getLogger("graphkiln.scoring")

# Writes `_run.json` and `_errors.parquet` while the destination is locked. The last argument is the error that ends the
# run, or None.
WriteNotes = Callable[[Destination, Lock, BaseException | None], None]


def score_data_set(
    request: ScoreRequest, report: Report = lambda _: None, write_notes: WriteNotes = lambda *_: None
) -> None:
    """Score a data set. Returns once every row of the input has an answer or an error in the destination.

    Args:
        request: The run.
        report: Called with each event.
        write_notes: Called once at the end if the destination was locked, unless another run took the lock.

    Raises:
        RunInterrupted: SIGINT, SIGTERM or SIGHUP, in the main thread.
        GraphkilnError: The run cannot be finished; the same request continues it. Errors of the model are raised before
            the destination is touched.
    """
    remove_dead_scratch()
    with interruptible(), scratch_folder(Scratch.PLAN) as folder:
        request, model = read_run_model(request, folder.path)
        destination = open_destination(request)
        destination.declare(lambda: _result_columns(request, model))
        destination.prepare()
        with destination.lock(secrets.token_hex(4)) as lock:
            try:
                request = pin_snapshot(request, destination.notes)
                note_snapshot(request, destination.notes)
                _score(request, model, destination, lock=lock, plan=folder.path / PLAN, report=report)
            except LockLost:  # the notes belong to the run that took the lock
                raise
            except BaseException as error:
                write_notes(destination, lock, error)
                _tell_unpublished(destination)
                raise
            write_notes(destination, lock, None)
            destination.notes.delete(SNAPSHOT)
    report(RunFinished())


def _score(
    request: ScoreRequest, model: ScoringModel, destination: Destination, *, lock: Lock, plan: Path, report: Report
) -> None:
    """Plan, score units without a result, and check the destination."""
    configuration = model.configuration(request)

    def listed() -> Iterator[InputRange]:
        for found in open_source(request).ranges(request.rows_per_unit):
            lock.check()
            yield found

    totals = write_plan(plan, listed(), configuration)
    state = read_resume_state(destination.committed_ids(), plan)
    remove_stale(destination, state.stale, configuration, replace=request.replace, check=lock.check)
    lock.check()
    destination.notes.replace(PLAN, plan)
    report(
        RunPlanned(
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
            _machines(request.address) as machines,
            interruptible(),  # again, because Ray has replaced the handler of SIGTERM
            Fleet(machines, request, configuration, on_gpu=model.wants_gpu, report=report) as fleet,
        ):
            drive(schedule, fleet, lock.check)
    check_complete(destination, plan, {each.unit_id: each.reason for each in schedule.failed})
    lock.check()
    destination.publish((unit.id for unit in read_plan(plan)), lock.check)


@contextmanager
def _machines(address: str) -> Iterator[Machines]:
    """Yield the nodes of a Ray cluster, if one is named or this process is connected to one; else this machine."""
    ray = sys.modules.get("ray")
    if address or (ray and ray.is_initialized()):
        from graphkiln_backend.scoring.ray_cluster import connect  # imports Ray, which takes two seconds

        with connect(address) as cluster:
            yield cluster
    else:
        with LocalMachine() as machine:
            yield machine


def _tell_unpublished(destination: Destination) -> None:
    """Log what a failed run leaves in the destination that readers do not see."""
    try:
        if waiting := destination.unpublished():
            _log.warning("%s", waiting)
    except GraphkilnError as error:
        _log.warning("it cannot be said what waits in the destination: %s", error)


def _result_columns(request: ScoreRequest, model: ScoringModel) -> pa.Schema:
    """Columns of the results; the types of kept columns are those of the first row."""
    kept: dict[str, pa.DataType] = {}
    if request.keep_columns:
        source = open_source(request)
        unit = next(source.ranges(request.rows_per_unit)).unit(model.configuration(request))
        kept = {name: values.type for name, values in next(source.rows(unit)).kept.items()}
    return result_schema(kept, model.encoder(request).schema)


def drive(
    schedule: Schedule, fleet: Fleet, check: Callable[[], None], clock: Callable[[], float] = time.monotonic
) -> None:
    """Give units to workers until each is committed or has failed for good.

    Args:
        schedule: The units.
        fleet: The workers.
        check: Raises if the lock of the destination is lost; called at least twice a second.
        clock: Monotonic clock in seconds.

    Raises:
        ScoringError: No node can take part, nothing can be committed, or unit after unit fails.
    """
    while not schedule.is_over:
        check()
        for worker in schedule.workers:
            while (attempt := schedule.take(worker, clock())) is not None:
                fleet.assign(worker, attempt)
        if schedule.is_over:
            return
        for outcome in fleet.wait(_WAIT_S, schedule.hang_timeout_s):
            schedule.handle(outcome, clock())


@contextmanager
def interruptible() -> Iterator[None]:
    """Raise `RunInterrupted` in the block at the first SIGINT, SIGTERM or SIGHUP, and ignore further ones.

    SIGHUP stays ignored under `nohup`. Has no effect outside the main thread, which receives no signals.
    """
    try:
        with raising_once(_SIGNALS, RunInterrupted):
            yield
    except SystemError as error:  # raised by compiled code that returns although its caller was interrupted
        if isinstance(error.__cause__, RunInterrupted):
            raise error.__cause__ from None
        raise
