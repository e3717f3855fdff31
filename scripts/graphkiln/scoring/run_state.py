"""Figures of a run, added up from its events once for the terminal, `_run.json` and the summary."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import singledispatchmethod

from graphkiln_backend.scoring.events import (
    Event,
    NodeJoined,
    NodeLost,
    NodeRefused,
    RowQuarantined,
    RunFinished,
    RunPlanned,
    UnitCommitted,
    UnitFailed,
    UnitRetried,
    WorkerEnded,
    WorkerReady,
)
from graphkiln_backend.scoring.outcomes import WorkerFacts
from graphkiln_backend.scoring.scorer import StageTimes

# How far a run is: one snapshot, which the terminal shows and `--progress json` prints.
#
# A line of `--progress json` is a `Progress` as JSON. `schema` changes when a key goes or means something else; new
# keys may come without.

SCHEMA = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerProgress:
    """A worker so far.

    Attributes:
        node: Name of its machine.
        pid: Process id.
        session: Engine, device and precision.
        units: Committed by it.
        rows: In these.
        rows_per_s: While it worked.
        ended: Why it is no longer there; empty while it is.
    """

    node: str
    pid: int
    session: str
    units: int = 0
    rows: int = 0
    rows_per_s: float = 0.0
    ended: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """A run so far.

    Attributes:
        schema: Schema of this object.
        event: What just happened: `begun`, `planned`, `node`, `worker`, `unit`, `retry`, `quarantine`,
            `failed` (a unit stays without a result), `finished` (each row is accounted for).
        message: The same in words, for a person; empty where the figures say it all.
        seconds: Since the run was started.
        units: Units of the plan.
        units_before: Units committed by earlier runs.
        units_done: Units committed by this run.
        rows: Rows of the plan.
        rows_before: Rows answered by earlier runs.
        rows_done: Rows answered by this run, errors included.
        errors: Rows of this run that have an error.
        quarantined: Rows with an error that ended a worker.
        retries: Attempts that failed and were made again.
        rows_per_s: Rate of the last minute.
        seconds_left: At the rate of the whole run; None where that is not known yet.
        workers: Each worker, lost ones included.
    """

    schema: int = SCHEMA
    event: str
    message: str = ""
    seconds: float = 0.0
    units: int = 0
    units_before: int = 0
    units_done: int = 0
    rows: int = 0
    rows_before: int = 0
    rows_done: int = 0
    errors: int = 0
    quarantined: int = 0
    retries: int = 0
    rows_per_s: float = 0.0
    seconds_left: float | None = None
    workers: tuple[WorkerProgress, ...] = field(default_factory=tuple)


_RECENT_S = 60.0
_MOST_NAMED = 1000  # rows and problems that are named one by one; more are only counted
_MANY_ROWS = 100  # where so many rows have an error, and no other row an answer, it is not the rows


@dataclass(kw_only=True, slots=True)
class WorkerTally:
    """A worker of the run.

    Attributes:
        facts: What it is; None for one that never was ready.
        node: Name of its machine.
        units: Committed by it.
        rows: In these.
        errors: Rows of these with an error.
        times: What the stages of its units took.
        ready_s: When it was ready, in seconds of the run.
        last_s: When it last committed.
        ended: Why it is no longer there; empty while it is.
    """

    facts: WorkerFacts | None
    node: str
    units: int = 0
    rows: int = 0
    errors: int = 0
    times: StageTimes = field(default_factory=StageTimes)
    ready_s: float = 0.0
    last_s: float = 0.0
    ended: str = ""

    @property
    def rows_per_s(self) -> float:
        """From when it was ready to its last commit."""
        return self.rows / (self.last_s - self.ready_s) if self.last_s > self.ready_s else 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class QuarantinedRow:
    """A row that ended a worker.

    Attributes:
        id: Id of the row.
        reason: What it does.
    """

    id: str
    unit_id: str
    reason: str


class RunState:
    """Adds up the events of a run.

    Args:
        clock: Seconds that only grow.

    Attributes:
        plan: What there is to do; None until that is known.
        workers: By their names, in the order of their starts.
        units: Committed by this run.
        rows: In these.
        errors: Rows of these with an error.
        quarantined: Rows that ended a worker, by name; the first thousand.
        retries: Attempts that came to nothing.
        twins: Units that an earlier attempt had committed.
        problems: What else a person should know, oldest first; the first thousand.
        finished: Whether each row is accounted for.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.plan: RunPlanned | None = None
        self.workers: dict[str, WorkerTally] = {}
        self.units = self.rows = self.errors = self.retries = self.twins = self.quarantined_rows = 0
        self.quarantined: list[QuarantinedRow] = []
        self.problems: list[str] = []
        self.finished = False
        self._clock, self._begun = clock, clock()
        self._first_ready: float | None = None
        self._recent: deque[tuple[float, int]] = deque()
        self._message = ("begun", "")
        self._doubted = False

    @property
    def seconds(self) -> float:
        """Since the run was begun."""
        return self._clock() - self._begun

    @property
    def computing_s(self) -> float:
        """Since the first worker was ready."""
        return 0.0 if self._first_ready is None else self.seconds - self._first_ready

    @property
    def rows_per_s(self) -> float:
        """Rate of the whole run since the first worker was ready."""
        return self.rows / self.computing_s if self.rows and self.computing_s > 0 else 0.0

    def observe(self, event: Event) -> Progress:
        """Take an event in.

        Returns:
            The run with it.
        """
        self._take(event)
        return self.progress()

    def progress(self) -> Progress:
        """The progress now."""
        event, message = self._message
        planned = self.plan
        units_before, rows_before = (planned.done_units, planned.done_rows) if planned else (0, 0)
        units = planned.units if planned else 0
        rows = planned.rows if planned else 0
        left, rate = max(rows - rows_before - self.rows, 0), self.rows_per_s
        return Progress(
            event=event,
            message=message,
            seconds=round(self.seconds, 3),
            units=units,
            units_before=units_before,
            units_done=self.units,
            rows=rows,
            rows_before=rows_before,
            rows_done=self.rows,
            errors=self.errors,
            quarantined=self.quarantined_rows,
            retries=self.retries,
            rows_per_s=round(self._recent_rate(), 1),
            seconds_left=round(left / rate, 1) if rate else None if left else 0.0,
            workers=tuple(map(_worker_progress, self.workers.values())),
        )

    def _recent_rate(self) -> float:
        """Rows of the last minute by the second; of the whole run while that is shorter."""
        while self._recent and self._recent[0][0] < self.seconds - _RECENT_S:
            self._recent.popleft()
        span = min(self.computing_s, _RECENT_S)
        return sum(rows for _, rows in self._recent) / span if span > 0 else 0.0

    @singledispatchmethod
    def _take(self, event: Event) -> None:
        """An event that changes no figure."""

    @_take.register
    def _(self, event: RunPlanned) -> None:
        self.plan = event
        self._message = ("planned", "")
        if event.removed_units:
            self._tell("planned", f"removed the results of {event.removed_units} units, whose input has changed")

    @_take.register
    def _(self, event: NodeJoined) -> None:
        plural = "s" if event.workers > 1 else ""
        self._message = ("node", f"{event.node}: starting {event.workers} worker{plural}")

    @_take.register
    def _(self, event: NodeLost) -> None:
        self._tell("node", f"{event.node} is gone: what it had begun is done elsewhere")

    @_take.register
    def _(self, event: NodeRefused) -> None:
        self._tell("node", f"{event.node} takes no part: {event.reason}")

    @_take.register
    def _(self, event: WorkerReady) -> None:
        if self._first_ready is None:
            self._first_ready = self.seconds
        facts = event.facts
        self.workers[event.worker] = WorkerTally(facts=facts, node=facts.node, ready_s=self.seconds)
        self._message = ("worker", f"{event.worker} on {facts.node}: {facts.session}, ready in {facts.seconds:.1f} s")

    @_take.register
    def _(self, event: WorkerEnded) -> None:
        tally = self.workers.setdefault(event.worker, WorkerTally(facts=None, node=event.node))
        tally.ended = event.reason
        self._tell("worker", f"{event.worker} on {event.node} ended: {event.reason}")

    @_take.register
    def _(self, event: UnitCommitted) -> None:
        self._message = ("unit", "")
        report = event.report
        self.twins += report.twin
        self.units, self.rows, self.errors = self.units + 1, self.rows + report.rows, self.errors + report.errors
        self._recent.append((self.seconds, report.rows))
        self.quarantined_rows += len(report.quarantined)
        for row_id, reason in report.quarantined.items():
            if len(self.quarantined) < _MOST_NAMED:
                self.quarantined.append(QuarantinedRow(id=row_id, unit_id=report.unit_id, reason=reason))
        if tally := self.workers.get(event.worker):
            tally.units, tally.rows = tally.units + 1, tally.rows + report.rows
            tally.errors, tally.times, tally.last_s = (
                tally.errors + report.errors,
                tally.times + report.times,
                self.seconds,
            )
        self._doubt(report.example)

    @_take.register
    def _(self, event: UnitRetried) -> None:
        self.retries += 1
        self._tell("retry", f"{event.path}: tried again: {event.reason}")

    @_take.register
    def _(self, event: RowQuarantined) -> None:
        self._tell("quarantine", f"{event.path}: row {event.position} of unit {event.unit_id}: {event.reason}")

    @_take.register
    def _(self, event: UnitFailed) -> None:
        self._tell("failed", f"{event.path}: unit {event.unit_id} stays without a result: {event.reason}")

    @_take.register
    def _(self, event: RunFinished) -> None:  # noqa: ARG002  dispatched by its type
        self.finished = True
        self._message = ("finished", "")

    def _doubt(self, example: str) -> None:
        """Say once that nothing is scored but errors: a path, a mount or a column may be another than was meant."""
        if not self._doubted and self.rows >= _MANY_ROWS and self.errors == self.rows:
            self._doubted = True
            self._tell("unit", f"all {self.rows:,} rows so far have an error, such as: {example}")

    def _tell(self, event: str, message: str) -> None:
        self._message = (event, message)
        if len(self.problems) < _MOST_NAMED:
            self.problems.append(message)


def _worker_progress(tally: WorkerTally) -> WorkerProgress:
    return WorkerProgress(
        node=tally.node,
        pid=tally.facts.pid if tally.facts else 0,
        session=tally.facts.session if tally.facts else "",
        units=tally.units,
        rows=tally.rows,
        rows_per_s=round(tally.rows_per_s, 1),
        ended=tally.ended,
    )
