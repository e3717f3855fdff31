"""Assign the units of a run to workers, and decide what follows from each outcome. Independent of Ray; never waits.

A worker computes two units at a time: one is read while the other is computed. If the worker ends, both are suspects. A
suspect is computed by a worker that has nothing else to do; if that worker ends as well, the unit is halved until the
guilty row is isolated, which is quarantined, and the rest of the unit is scored. Rows are never blamed for failures of
a node or a store, or for a worker that computes wrong answers.
"""

from __future__ import annotations

import heapq
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import count

from graphkiln_backend.scoring.errors import ScoringError
from graphkiln_backend.scoring.messages import (
    Attempt,
    Blame,
    Cause,
    Done,
    Ended,
    Event,
    Failed,
    Outcome,
    RowQuarantined,
    Span,
    Survived,
    Unit,
    UnitCommitted,
    UnitFailed,
    UnitRetried,
    WorkerEnded,
    WorkerReady,
)

UNITS_PER_WORKER = 2  # one is read while the other is computed
CONFIRMATIONS = 2  # workers that a row must end when it is computed alone; a single one may have ended by chance
MAX_GUILTY_ROWS = 50  # per unit; with more of them the problem is not a row
MAX_SEARCHES = 5  # without a result per unit: its worker ends, but no single row ends it
# Attempts that fail because a row cannot be read, within about two minutes. In the next attempt such a row becomes an
# error: a bad disk block or a broken object must not block the other rows of its unit.
MAX_OUTAGES = 7
# Failed attempts per unit and cause. A store that keeps failing ends the run earlier.
_MAX_FAILURES = {
    Cause.CHANGED: 1,
    Cause.UNREADABLE: 3,
    Cause.SOURCE: MAX_OUTAGES + 1,
    Cause.REFUSED: 1,
    Cause.STORE: 1000,
    Cause.COMMIT: 5,
}
MAX_DELAY_S = 60.0  # of a retry; the delay starts at one second and doubles
MAX_STORE_FAILURES = 4  # in a row, without a commit in between; workers have already retried each of these writes
MAX_FAILED_UNITS = 5  # in a row
_HINT = "what was committed stays; run the same command to go on"

# Seconds without progress after which a worker hangs. Each row that is read or started is progress, so that a slow unit
# does not count as a hang.
MIN_PATIENCE_S = 60.0  # covers the retries of a slow store
FIRST_PATIENCE_S = 600.0  # until a unit is committed: the first batch may compile kernels
_PATIENCE_FACTOR = 3.0  # times the duration of the slowest of the last units
_RECENT_UNITS = 50


class RowSearch:
    """Binary search for the row of a unit that ends its worker.

    Only the first of two halves is probed: if it is innocent, the row is in the other one, which the end confirms.

    Args:
        rows: Number of rows of the unit.

    Attributes:
        guilty: Position of the guilty row, once it is known.
        inconclusive: True if no single row ends the worker: there was another reason, or several rows do it together.
    """

    def __init__(self, rows: int) -> None:
        self._candidates = Span(start=0, stop=rows)
        self._confirmed = 0
        self.guilty: int | None = None
        self.inconclusive = rows == 0

    @property
    def is_over(self) -> bool:
        """True if there is nothing left to probe."""
        return self.inconclusive or self.guilty is not None

    @property
    def probe(self) -> Span:
        """Rows to compute next."""
        start, stop = self._candidates.start, self._candidates.stop
        return self._candidates if stop - start == 1 else Span(start=start, stop=(start + stop) // 2)

    def survived(self) -> None:
        """Record that the worker computed the probe."""
        if len(self._candidates) == 1:
            self.inconclusive = True
        else:
            self._candidates = Span(start=self.probe.stop, stop=self._candidates.stop)

    def ended(self) -> None:
        """Record that the worker ended while it computed the probe."""
        self._candidates = self.probe
        if len(self._candidates) == 1:
            self._confirmed += 1
            if self._confirmed == CONFIRMATIONS:
                self.guilty = self._candidates.start


@dataclass(slots=True)
class _UnitState:
    """History of a unit without a result.

    Attributes:
        quarantined: Guilty rows by position, with the reason.
        suspect: True if the unit must be computed alone, because a worker ended with it.
        searches: Number of inconclusive searches.
        failures: Failed attempts by cause.
        reason: Reason of the last failure.
    """

    unit: Unit
    quarantined: dict[int, str] = field(default_factory=dict)
    suspect: bool = False
    search: RowSearch | None = None
    searches: int = 0
    failures: Counter[Cause] = field(default_factory=Counter)
    reason: str = ""

    def blame(self, *, alone: bool, reason: str) -> None:
        """Record that a worker ended, or failed, while it computed this unit."""
        self.reason = reason
        if not alone:
            self.suspect = True
        elif self.search:
            self.search.ended()
        else:
            self.search = RowSearch(self.unit.rows)

    def finish_search(self) -> int | None:
        """Remove a search that is over; return the position of the row that it found, if any."""
        if self.search is None or not self.search.is_over:
            return None
        guilty, self.search = self.search.guilty, None
        if guilty is None:
            self.searches += 1
        else:
            self.quarantined[guilty] = self.reason
        return guilty

    def reason_to_give_up(self) -> str:
        """Return why no further attempt makes sense, or an empty string."""
        if self.searches >= MAX_SEARCHES:
            return f"{self.reason}, and no row of it does so alone"
        if len(self.quarantined) > MAX_GUILTY_ROWS:
            return f"more than {MAX_GUILTY_ROWS} rows of it are such that it {self.reason}"
        return ""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Running:
    """An attempt in progress; `alone` if its worker computes nothing else."""

    state: _UnitState
    worker: str
    alone: bool


class Schedule:
    """The units of a run. Memory holds only those in progress and those to be retried.

    Args:
        units: Units without a result.
        report: Called with each event.

    Attributes:
        failed: Units that stay without a result.
    """

    def __init__(self, units: Iterator[Unit], report: Callable[[Event], None]) -> None:
        self._units, self._report = units, report
        self._exhausted = False
        self._numbers = count(1)
        self._retries: list[tuple[float, int, _UnitState]] = []
        self._suspects: deque[_UnitState] = deque()
        self._running: dict[int, _Running] = {}
        self._busy: dict[str, set[int]] = {}
        self._nodes: dict[str, str] = {}
        self._reserved: set[str] = set()
        self._seconds: deque[float] = deque(maxlen=_RECENT_UNITS)
        self._store_failures = self._failed_units = 0
        self.failed: list[UnitFailed] = []

    @property
    def is_over(self) -> bool:
        """True if every unit has a result or has failed."""
        return self._exhausted and not self._retries and not self._suspects and not self._running

    @property
    def workers(self) -> list[str]:
        """Names of the workers that are ready."""
        return list(self._nodes)

    @property
    def patience_s(self) -> float:
        """Seconds without progress after which a worker hangs."""
        return max(MIN_PATIENCE_S, _PATIENCE_FACTOR * max(self._seconds)) if self._seconds else FIRST_PATIENCE_S

    def take(self, worker: str, now: float) -> Attempt | None:
        """Start an attempt on a worker; None if the worker has to wait."""
        busy = self._busy[worker]
        if any(self._running[number].alone for number in busy):
            return None
        while self._retries and self._retries[0][0] <= now and self._retries[0][2].suspect:
            self._suspects.append(heapq.heappop(self._retries)[2])
        if self._suspects and self._reserve_if_needed(worker, busy=bool(busy)):
            return None if busy else self._start(self._suspects.popleft(), worker, alone=True)
        self._reserved.discard(worker)
        if len(busy) >= UNITS_PER_WORKER:
            return None
        state = self._next_unit(now)
        return self._start(state, worker, alone=False) if state else None

    def handle(self, outcome: Outcome, now: float) -> None:
        """Update the schedule with an outcome.

        Raises:
            ScoringError: The run cannot go on: the destination cannot be written, or unit after unit fails.
        """
        match outcome:
            case WorkerReady():
                self._nodes[outcome.worker], self._busy[outcome.worker] = outcome.facts.node, set()
                self._report(outcome)
            case Survived():
                state = self._remove(outcome.attempt).state
                if state.search:
                    state.search.survived()
                self._retry_or_give_up(state)
            case Done():
                self._remove(outcome.attempt)
                self._store_failures = self._failed_units = 0
                self._seconds.append(outcome.report.seconds)
                self._report(UnitCommitted(worker=outcome.worker, report=outcome.report))
            case Failed():
                self._fail(self._remove(outcome.attempt), outcome.cause, outcome.reason, now)
            case Ended():
                self._end(outcome, now)

    def _reserve_if_needed(self, worker: str, *, busy: bool) -> bool:
        """Return True if a worker is idle, or takes nothing new until it is idle and can compute a suspect.

        At most half of the workers are reserved, but at least one.
        """
        if worker in self._reserved or not busy:
            return True
        if len(self._reserved) >= min(len(self._suspects), max(1, len(self._nodes) // 2)):
            return False
        self._reserved.add(worker)
        return True

    def _next_unit(self, now: float) -> _UnitState | None:
        if self._retries and self._retries[0][0] <= now:
            return heapq.heappop(self._retries)[2]
        unit = None if self._exhausted else next(self._units, None)
        self._exhausted = unit is None
        return _UnitState(unit=unit) if unit else None

    def _start(self, state: _UnitState, worker: str, *, alone: bool) -> Attempt:
        number = next(self._numbers)
        self._running[number] = _Running(state=state, worker=worker, alone=alone)
        self._busy[worker].add(number)
        return Attempt(
            number=number,
            unit=state.unit,
            quarantined=dict(state.quarantined),
            probe=state.search.probe if state.search else None,
            outages_are_errors=state.failures[Cause.SOURCE] >= MAX_OUTAGES,
        )

    def _fail(self, running: _Running, cause: Cause, reason: str, now: float) -> None:
        state = running.state
        state.failures[cause] += 1
        if cause is Cause.ROWS:
            self._report_retry(state, reason)
            state.blame(alone=running.alone, reason=reason)
            self._retry_or_give_up(state)
        elif state.failures[cause] >= _MAX_FAILURES[cause]:
            self._give_up(state, reason)
        else:
            self._store_failures += cause is Cause.STORE
            if self._store_failures >= MAX_STORE_FAILURES:
                raise ScoringError(f"the destination cannot be written: {reason}", hint=_HINT)
            self._report_retry(state, reason)
            self._queue(state, now + min(MAX_DELAY_S, 0.5 * 2.0 ** state.failures[cause]))

    def _end(self, outcome: Ended, now: float) -> None:
        node = self._nodes.pop(outcome.worker, "")
        self._reserved.discard(outcome.worker)
        unfit = outcome.blame is Blame.WORKER
        self._report(WorkerEnded(worker=outcome.worker, node=node, reason=outcome.reason, unfit=unfit))
        for number in sorted(self._busy.pop(outcome.worker, ())):
            running = self._running.pop(number)
            if number in outcome.committing:  # all of its rows were computed
                self._fail(running, Cause.COMMIT, outcome.reason, now)
                continue
            self._report_retry(running.state, outcome.reason)
            if outcome.blame is Blame.ROWS:
                running.state.blame(alone=running.alone, reason=outcome.reason)
            self._retry_or_give_up(running.state, now)

    def _remove(self, number: int) -> _Running:
        running = self._running.pop(number)
        self._busy[running.worker].discard(number)
        return running

    def _retry_or_give_up(self, state: _UnitState, now: float = 0.0) -> None:
        if (position := state.finish_search()) is not None:
            unit = state.unit
            self._report(RowQuarantined(unit_id=unit.id, path=unit.path, position=position, reason=state.reason))
        if reason := state.reason_to_give_up():
            self._give_up(state, reason)
        else:
            self._queue(state, now)

    def _queue(self, state: _UnitState, due: float) -> None:
        heapq.heappush(self._retries, (due, next(self._numbers), state))

    def _report_retry(self, state: _UnitState, reason: str) -> None:
        self._report(UnitRetried(unit_id=state.unit.id, path=state.unit.path, reason=reason))

    def _give_up(self, state: _UnitState, reason: str) -> None:
        failed = UnitFailed(unit_id=state.unit.id, path=state.unit.path, reason=reason)
        self.failed.append(failed)
        self._report(failed)
        self._failed_units += 1
        if self._failed_units >= MAX_FAILED_UNITS:
            message = f"{self._failed_units} units in a row failed, the last one ({failed.path}): {failed.reason}"
            raise ScoringError(message, hint=_HINT)
