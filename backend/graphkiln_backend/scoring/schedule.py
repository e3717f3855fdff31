"""Assign the units of a run to workers, and decide what follows from each outcome. Independent of Ray; never waits.

A worker computes two units at a time: one is read while the other is computed. If the worker ends, both are suspects. A
suspect is computed by a worker that has nothing else to do; if that worker ends as well, the unit is halved until the
poison row is isolated, which is quarantined, and the rest of the unit is scored. Rows are never blamed for failures of
a node or a store, or for a worker that computes wrong answers. A node may also crash every worker: so after a worker
ended with a unit, the next attempt at it is made on another node if there is one.
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
MAX_POISON_ROWS = 50  # per unit; with more of them the problem is not a row
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

# Seconds without progress after which a worker hangs. Each row that is read and each batch that is computed is
# progress, so that a slow unit does not count as a hang.
MIN_HANG_TIMEOUT_S = 60.0  # covers the retries of a slow store
FIRST_HANG_TIMEOUT_S = 600.0  # of a worker that has not computed anything yet: the first batch may compile kernels
_HANG_TIMEOUT_FACTOR = 3.0  # times the duration of the slowest of the last units
_RECENT_UNITS = 50


class RowSearch:
    """Binary search for the row of a unit that ends its worker.

    Only the first of two halves is probed: if it is innocent, the row is in the other one, which the end confirms.

    Args:
        rows: Number of rows of the unit.

    Attributes:
        poison: Position of the poison row, once it is known.
        inconclusive: True if no single row ends the worker: there was another reason, or several rows do it together.
    """

    def __init__(self, rows: int) -> None:
        self._candidates = Span(start=0, stop=rows)
        self._confirmed = 0
        self.poison: int | None = None
        self.inconclusive = rows == 0

    @property
    def is_over(self) -> bool:
        """True if there is nothing left to probe."""
        return self.inconclusive or self.poison is not None

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
                self.poison = self._candidates.start


@dataclass(slots=True)
class _UnitState:
    """History of a unit without a result.

    Attributes:
        quarantined: Poison rows by position, with the reason.
        suspect: True if the unit must be computed alone, because a worker ended with it.
        ended_on: Node where the last worker ended with it; empty if there is none.
        searches: Number of inconclusive searches.
        failures: Failed attempts by cause.
        reason: Reason of the last failure.
    """

    unit: Unit
    quarantined: dict[int, str] = field(default_factory=dict)
    suspect: bool = False
    ended_on: str = ""
    search: RowSearch | None = None
    searches: int = 0
    failures: Counter[Cause] = field(default_factory=Counter)
    reason: str = ""

    def blame(self, *, alone: bool, node: str, reason: str) -> None:
        """Record that a worker ended, or failed, while it computed this unit.

        Example of a unit of 8 rows whose row 5 is poison: a worker ends with this unit and another one, so that both
        are suspects; another worker ends with this one alone, and the search begins. The probe 0-3 survives, 4-5 ends
        a worker, 4 survives, 5 ends two workers: row 5 is quarantined, and the unit is scored without it.
        """
        self.reason, self.ended_on = reason, node
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
        poison, self.search = self.search.poison, None
        if poison is None:
            self.searches += 1
        else:
            self.quarantined[poison] = f"its worker {self.reason}"
        return poison

    def reason_to_give_up(self) -> str:
        """Return why no further attempt makes sense, or an empty string."""
        if self.searches >= MAX_SEARCHES:
            return f"its worker {self.reason}, and no row causes that alone"
        if len(self.quarantined) > MAX_POISON_ROWS:
            return f"with more than {MAX_POISON_ROWS} of its rows, its worker {self.reason}"
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
        self._fresh: set[str] = set()  # workers that have not computed anything yet
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

    def hang_timeout_s(self, worker: str) -> float:
        """Return the seconds without progress after which a worker hangs.

        The search for a row that hangs ends a worker with every second probe: it cannot wait as long as a first batch.
        """
        searches = any(self._running[number].alone for number in self._busy.get(worker, ()))
        if not self._seconds or (worker in self._fresh and not searches):
            return FIRST_HANG_TIMEOUT_S
        return max(MIN_HANG_TIMEOUT_S, _HANG_TIMEOUT_FACTOR * max(self._seconds))

    def take(self, worker: str, now: float) -> Attempt | None:
        """Start an attempt on a worker; None if the worker has to wait."""
        busy = self._busy[worker]
        if any(self._running[number].alone for number in busy):
            return None
        while self._retries and self._retries[0][0] <= now and self._retries[0][2].suspect:
            self._suspects.append(heapq.heappop(self._retries)[2])
        suspect = self._suspect_for(self._nodes[worker])
        if suspect and self._reserve_if_needed(worker, busy=bool(busy)):
            if busy:
                return None
            self._suspects.remove(suspect)
            return self._start(suspect, worker, alone=True)
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
                self._fresh.add(outcome.worker)
                self._report(outcome)
            case Survived():
                state = self._remove(outcome.attempt).state
                self._fresh.discard(outcome.worker)
                if state.search:
                    state.search.survived()
                self._retry_or_give_up(state, now)
            case Done():
                self._remove(outcome.attempt)
                self._fresh.discard(outcome.worker)
                self._store_failures = self._failed_units = 0
                self._seconds.append(outcome.report.seconds)
                self._report(UnitCommitted(worker=outcome.worker, report=outcome.report))
            case Failed():
                self._fail(self._remove(outcome.attempt), outcome.cause, outcome.reason, now)
            case Ended():
                self._end(outcome, now)

    def _suspect_for(self, node: str) -> _UnitState | None:
        """Return the first suspect whose last worker ended on another node than this one, if there is another."""
        only_node = all(each == node for each in self._nodes.values())
        return next((each for each in self._suspects if only_node or each.ended_on != node), None)

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
            state.blame(alone=running.alone, node=self._nodes[running.worker], reason=reason)
            self._retry_or_give_up(state, now)
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
        self._fresh.discard(outcome.worker)
        unfit = outcome.blame is Blame.WORKER
        self._report(WorkerEnded(worker=outcome.worker, node=node, reason=outcome.reason, unfit=unfit))
        for number in sorted(self._busy.pop(outcome.worker, ())):
            running = self._running.pop(number)
            if number in outcome.committing:  # all of its rows were computed
                self._fail(running, Cause.COMMIT, outcome.reason, now)
                continue
            self._report_retry(running.state, outcome.reason)
            if outcome.blame is Blame.ROWS:
                running.state.blame(alone=running.alone, node=node, reason=outcome.reason)
            self._retry_or_give_up(running.state, now)

    def _remove(self, number: int) -> _Running:
        running = self._running.pop(number)
        self._busy[running.worker].discard(number)
        return running

    def _retry_or_give_up(self, state: _UnitState, now: float) -> None:
        if (position := state.finish_search()) is not None:
            unit, reason = state.unit, state.quarantined[position]
            self._report(RowQuarantined(unit_id=unit.id, path=unit.path, position=position, reason=reason))
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
