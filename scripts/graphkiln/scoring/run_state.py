"""Figures of a run, added up from its events once for the terminal, `_run.json` and the summary."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from graphkiln_backend.scoring.messages import (
    Event,
    NodeJoined,
    NodeLost,
    NodeRefused,
    RowQuarantined,
    RunFinished,
    RunPlanned,
    StageTimes,
    UnitCommitted,
    UnitFailed,
    UnitReport,
    UnitRetried,
    WorkerEnded,
    WorkerFacts,
    WorkerReady,
)

SCHEMA = 1
# The name of each event in `Progress`, and its message; empty where the figures say it all.
_WORDS: Mapping[type, tuple[str, Callable[[Any], str]]] = {
    RunPlanned: (
        "planned",
        lambda event: (
            f"removed the results of {event.removed_units} units, whose input has changed"
            if event.removed_units
            else ""
        ),
    ),
    NodeJoined: (
        "node",
        lambda event: f"{event.node}: starting {event.workers} worker{'s' if event.workers > 1 else ''}",
    ),
    NodeLost: ("node", lambda event: f"{event.node} is gone: what it had begun is done elsewhere"),
    NodeRefused: ("node", lambda event: f"{event.node} takes no part: {event.reason}"),
    WorkerReady: (
        "worker",
        lambda event: (
            f"{event.worker} on {event.facts.node}: {event.facts.session}, ready in {event.facts.seconds:.1f} s"
        ),
    ),
    WorkerEnded: ("worker", lambda event: f"{event.worker} on {event.node} ended: {event.reason}"),
    UnitCommitted: ("unit", lambda _: ""),
    UnitRetried: ("retry", lambda event: f"{event.path}: tried again: {event.reason}"),
    RowQuarantined: (
        "quarantine",
        lambda event: f"{event.path}: row {event.position} of unit {event.unit_id}: {event.reason}",
    ),
    UnitFailed: (
        "failed",
        lambda event: f"{event.path}: unit {event.unit_id} stays without a result: {event.reason}",
    ),
    RunFinished: ("finished", lambda _: ""),
}
_RECENT_S = 60.0
_MOST_NAMED = 1000  # rows and problems that are named one by one; more are only counted
_MANY_ROWS = 100  # where so many rows have an error, and no other row an answer, it is not the rows


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerProgress:
    """A worker so far.

    Attributes:
        node: Name of its machine.
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
    """A run so far, which the terminal shows; as JSON it is a line of `--progress json`.

    Attributes:
        schema: Schema of this object; it changes when a key goes or means something else. New keys may come without.
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
    workers: tuple[WorkerProgress, ...] = ()


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

    def progress(self) -> WorkerProgress:
        """The worker so far."""
        return WorkerProgress(
            node=self.node,
            pid=self.facts.pid if self.facts else 0,
            session=self.facts.session if self.facts else "",
            units=self.units,
            rows=self.rows,
            rows_per_s=round(self.rows_per_s, 1),
            ended=self.ended,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class QuarantinedRow:
    """A row that ended a worker, and what it does."""

    id: str
    unit_id: str
    reason: str


class RunState:
    """Adds up the events of a run.

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
        self._latest = ("begun", "")
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
        """Take an event in, and return the progress with it."""
        self._count(event)
        name, in_words = _WORDS[type(event)]
        message = in_words(event)
        self._latest = (name, message)
        if message and not isinstance(event, NodeJoined | WorkerReady):
            self._keep_problem(message)
        if isinstance(event, UnitCommitted):
            self._doubt(event.report.example)
        return self.progress()

    def progress(self) -> Progress:
        """The progress now."""
        event, message = self._latest
        plan = self.plan
        rows, rows_before = (plan.rows, plan.done_rows) if plan else (0, 0)
        left, rate = max(rows - rows_before - self.rows, 0), self.rows_per_s
        return Progress(
            event=event,
            message=message,
            seconds=round(self.seconds, 3),
            units=plan.units if plan else 0,
            units_before=plan.done_units if plan else 0,
            units_done=self.units,
            rows=rows,
            rows_before=rows_before,
            rows_done=self.rows,
            errors=self.errors,
            quarantined=self.quarantined_rows,
            retries=self.retries,
            rows_per_s=round(self._recent_rate(), 1),
            seconds_left=round(left / rate, 1) if rate else None if left else 0.0,
            workers=tuple(tally.progress() for tally in self.workers.values()),
        )

    def _recent_rate(self) -> float:
        """Rows of the last minute by the second; of the whole run while that is shorter."""
        while self._recent and self._recent[0][0] < self.seconds - _RECENT_S:
            self._recent.popleft()
        span = min(self.computing_s, _RECENT_S)
        return sum(rows for _, rows in self._recent) / span if span > 0 else 0.0

    def _count(self, event: Event) -> None:
        match event:
            case RunPlanned():
                self.plan = event
            case WorkerReady():
                if self._first_ready is None:
                    self._first_ready = self.seconds
                self.workers[event.worker] = WorkerTally(facts=event.facts, node=event.facts.node, ready_s=self.seconds)
            case WorkerEnded():
                tally = self.workers.setdefault(event.worker, WorkerTally(facts=None, node=event.node))
                tally.ended = event.reason
            case UnitCommitted():
                self._count_unit(event.worker, event.report)
            case UnitRetried():
                self.retries += 1
            case RunFinished():
                self.finished = True

    def _count_unit(self, worker: str, report: UnitReport) -> None:
        self.twins += report.twin
        self.units, self.rows, self.errors = self.units + 1, self.rows + report.rows, self.errors + report.errors
        self._recent.append((self.seconds, report.rows))
        self.quarantined_rows += len(report.quarantined)
        for row_id, reason in report.quarantined.items():
            if len(self.quarantined) < _MOST_NAMED:
                self.quarantined.append(QuarantinedRow(id=row_id, unit_id=report.unit_id, reason=reason))
        if tally := self.workers.get(worker):
            tally.units, tally.rows, tally.errors = (
                tally.units + 1,
                tally.rows + report.rows,
                tally.errors + report.errors,
            )
            tally.times, tally.last_s = tally.times + report.times, self.seconds

    def _doubt(self, example: str) -> None:
        """Say once that nothing is scored but errors: a path, a mount or a column may be another than was meant."""
        if not self._doubted and self.rows >= _MANY_ROWS and self.errors == self.rows:
            self._doubted = True
            message = f"all {self.rows:,} rows so far have an error, such as: {example}"
            self._latest = ("unit", message)
            self._keep_problem(message)

    def _keep_problem(self, message: str) -> None:
        if len(self.problems) < _MOST_NAMED:
            self.problems.append(message)
