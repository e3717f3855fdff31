"""Figures of a run, summed up from its events for the terminal, `_run.json` and the summary."""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
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
# Name of each event in `Progress`, and its message; empty if the figures are enough.
_DESCRIPTIONS: Mapping[type, tuple[str, Callable[[Any], str]]] = {
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
    NodeLost: ("node", lambda event: f"{event.node} is gone: its units are computed elsewhere"),
    NodeRefused: ("node", lambda event: f"{event.node} is not used: {event.reason}"),
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
_MAX_NAMED = 1000  # quarantined rows and problems; more are only counted
_DOUBTFUL_ROWS = 100  # errors without a single answer after which a warning is reported


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerProgress:
    """Progress of a worker.

    Attributes:
        node: Host name.
        session: Engine, device and precision.
        units: Units that it committed.
        rows_per_s: Rate from its start to its last commit.
        ended: Why it ended; empty while it runs.
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
    """Progress of a run; as JSON, it is a line of `--progress json`.

    Attributes:
        schema: Version of the format; increased when a key is removed or changes its meaning, not for new keys.
        event: The last event: `begun`, `planned`, `node`, `worker`, `unit`, `retry`, `quarantine`, `failed` (a unit
            stays without a result) or `finished` (every row is accounted for).
        message: Description of the event for people; empty if the figures are enough.
        seconds: Since the start of the run.
        units: Units of the plan.
        units_before: Units committed by earlier runs.
        units_done: Units committed by this run.
        rows: Rows of the plan.
        rows_before: Rows of units committed by earlier runs.
        rows_done: Rows of units committed by this run, including errors.
        errors: Rows of this run with an error.
        quarantined: Rows of those that ended a worker.
        retries: Failed attempts.
        rows_per_s: Rate of the last minute.
        seconds_left: At the rate of the whole run; None if unknown.
        workers: All workers, including those that ended.
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
class WorkerRecord:
    """A worker in `_run.json`, updated during the run.

    Attributes:
        node: Host name.
        session: Engine, device and precision.
        self_test: Report of the golden samples; None if the model has none, or the worker never was ready.
        version: Version of graphkiln on the node.
        start_s: Start-up time.
        units: Units that it committed.
        errors: Rows with an error.
        rows_per_s: Rate from its start to its last commit.
        times: Seconds per stage.
        ended: Why it ended; empty while it runs.
    """

    name: str
    node: str
    pid: int = 0
    session: str = ""
    self_test: Any = None
    version: str = ""
    start_s: float = 0.0
    units: int = 0
    rows: int = 0
    errors: int = 0
    rows_per_s: float = 0.0
    times: StageTimes = field(default_factory=StageTimes)
    ended: str = ""

    @classmethod
    def of(cls, name: str, facts: WorkerFacts) -> WorkerRecord:
        """Describe a worker that is ready."""
        return cls(
            name=name,
            node=facts.node,
            pid=facts.pid,
            session=facts.session,
            self_test=json.loads(facts.self_test) if facts.self_test else None,
            version=facts.version,
            start_s=round(facts.seconds, 3),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class QuarantinedRow:
    """A row that ended a worker."""

    id: str
    unit_id: str
    reason: str


class RunState:
    """Sums up the events of a run.

    Attributes:
        plan: The plan, once it is known.
        workers: Workers by name, in the order of their starts.
        units: Units committed by this run.
        rows: Rows of these units.
        errors: Rows with an error.
        quarantined: Rows that ended a worker; the first thousand.
        retries: Failed attempts.
        twins: Units committed by an attempt whose worker ended before it could report it.
        problems: Messages about failures, oldest first; the first thousand.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.plan: RunPlanned | None = None
        self.workers: dict[str, WorkerRecord] = {}
        self._ready_s: dict[str, float] = {}
        self.units = self.rows = self.errors = self.retries = self.twins = self.quarantined_rows = 0
        self.quarantined: list[QuarantinedRow] = []
        self.problems: list[str] = []
        self._clock, self._begun = clock, clock()
        self._first_ready: float | None = None
        self._recent: deque[tuple[float, int]] = deque()
        self._latest = ("begun", "")
        self._warned = False

    @property
    def seconds(self) -> float:
        """Seconds since the start of the run."""
        return self._clock() - self._begun

    @property
    def computing_s(self) -> float:
        """Seconds since the first worker was ready."""
        return 0.0 if self._first_ready is None else self.seconds - self._first_ready

    @property
    def rows_per_s(self) -> float:
        """Rate of the whole run since the first worker was ready."""
        return self.rows / self.computing_s if self.rows and self.computing_s > 0 else 0.0

    def observe(self, event: Event) -> Progress:
        """Add an event, and return the progress."""
        self._count(event)
        name, describe = _DESCRIPTIONS[type(event)]
        message = describe(event)
        self._latest = (name, message)
        if message and not isinstance(event, NodeJoined | WorkerReady):
            self._add_problem(message)
        if isinstance(event, UnitCommitted):
            self._warn_if_all_failed(event.report.example)
        return self.progress()

    def progress(self) -> Progress:
        """Return the progress."""
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
            workers=tuple(
                WorkerProgress(**{each.name: getattr(worker, each.name) for each in fields(WorkerProgress)})
                for worker in self.workers.values()
            ),
        )

    def _recent_rate(self) -> float:
        """Return the rate of the last minute, or of the whole run if it is shorter."""
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
                self.workers[event.worker] = WorkerRecord.of(event.worker, event.facts)
                self._ready_s[event.worker] = self.seconds
            case WorkerEnded():
                never_ready = WorkerRecord(name=event.worker, node=event.node)
                self.workers.setdefault(event.worker, never_ready).ended = event.reason
            case UnitCommitted():
                self._count_unit(event.worker, event.report)
            case UnitRetried():
                self.retries += 1

    def _count_unit(self, worker: str, report: UnitReport) -> None:
        self.twins += report.twin
        self.units, self.rows, self.errors = self.units + 1, self.rows + report.rows, self.errors + report.errors
        self._recent.append((self.seconds, report.rows))
        self.quarantined_rows += len(report.quarantined)
        for row_id, reason in report.quarantined.items():
            if len(self.quarantined) < _MAX_NAMED:
                self.quarantined.append(QuarantinedRow(id=row_id, unit_id=report.unit_id, reason=reason))
        if record := self.workers.get(worker):
            record.units += 1
            record.rows += report.rows
            record.errors += report.errors
            record.times += report.times
            working_s = self.seconds - self._ready_s.get(worker, 0.0)
            record.rows_per_s = round(record.rows / working_s, 1) if working_s > 0 else 0.0

    def _warn_if_all_failed(self, example: str) -> None:
        """Report once that all rows have errors: a path, a mount or a column is probably wrong."""
        if not self._warned and self.rows >= _DOUBTFUL_ROWS and self.errors == self.rows:
            self._warned = True
            message = f"all {self.rows:,} rows so far have an error, such as: {example}"
            self._latest = ("unit", message)
            self._add_problem(message)

    def _add_problem(self, message: str) -> None:
        if len(self.problems) < _MAX_NAMED:
            self.problems.append(message)
