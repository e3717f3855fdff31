"""The units of a run until each is committed: who tries which unit next, and what follows from each outcome.

A worker computes two units at a time: one is read while the other is computed. When it ends, both are suspects. A
suspect is computed by a worker that has nothing else to do; if that one ends, too, the unit is halved until the guilty
row is alone, which is quarantined, and the rest of the unit is scored. What happens to a node, to a store, or to a
worker that computes wrongly is never blamed on rows. Nothing in here knows Ray, or waits.
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
    Ready,
    RowQuarantined,
    Span,
    UnitCommitted,
    UnitFailed,
    UnitReport,
    UnitRetried,
    WorkerEnded,
    WorkerReady,
)
from graphkiln_backend.scoring.units import Unit

UNITS_PER_WORKER = 2  # one is read while the other is computed
CONFIRMATIONS = 2  # a row is guilty when it ends two workers that compute it alone: one may end for its own reasons
MOST_GUILTY_ROWS = 50  # a unit with more of them has another problem than its rows
# Searches of a unit that find no row, although its worker ends: others may kill workers, again and again.
MOST_SEARCHES = 5
# Attempts that end because a row cannot be read just now, two minutes together; in the one after them that row is an
# error: a disk that cannot read one block, or an object whose service always fails, must not keep the others.
MOST_OUTAGES = 7
# Attempts of a unit that end for the same cause; a store that fails ends the run before.
_MOST_TRIES = {
    Cause.CHANGED: 1,
    Cause.UNREADABLE: 3,
    Cause.SOURCE: MOST_OUTAGES + 1,
    Cause.REFUSED: 1,
    Cause.STORE: 1000,
    Cause.COMMIT: 5,
}
LONGEST_WAIT_S = 60.0  # before a unit is tried again; a second at first, and twice as long each time
MOST_STORE_FAILURES = 4  # in a row, with no commit between them; a worker has been patient with the store each time
MOST_FAILED_UNITS = 5  # in a row: then it is not the units
_HINT = "what was committed stays; run the same command to go on"

# Seconds without progress after which a worker hangs. Progress is each row that is begun or read, so that a slow unit
# is not taken for one that hangs.
FLOOR_S = 60.0  # a store may take its time to answer a read, and retries it
FIRST_S = 600.0  # until a unit was measured: the first batch may compile kernels
_FACTOR = 3.0  # times the slowest of the last units as a whole
_REMEMBERED = 50


class RowSearch:
    """A search by halving for one guilty row in a unit that ended its worker.

    `probe` is what to compute next; `survived` and `ended` take what became of it. Of two halves only the first is
    probed: where it is innocent, the row is in the other one, which the end proves.

    Args:
        rows: How many the unit has.
    """

    def __init__(self, rows: int) -> None:
        self._candidates = Span(start=0, stop=rows)
        self._confirmed = 0
        self.guilty: int | None = None
        """Position of the guilty row, once it is known."""
        self.inconclusive = rows == 0
        """Whether no single row does it: the worker ended for another reason, or because of several rows together."""

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
        """Take in that the worker computed the probe."""
        if len(self._candidates) == 1:
            self.inconclusive = True
        else:
            self._candidates = Span(start=self.probe.stop, stop=self._candidates.stop)

    def ended(self) -> None:
        """Take in that the worker ended while it computed the probe."""
        self._candidates = self.probe
        if len(self._candidates) == 1:
            self._confirmed += 1
            if self._confirmed == CONFIRMATIONS:
                self.guilty = self._candidates.start


@dataclass(slots=True)
class _UnitState:
    """Attempts and findings of a unit that has no result yet.

    Attributes:
        quarantined: Guilty rows by position, with the reason.
        suspect: True if the unit is computed alone, because a worker ended with it.
        search: Running search for the guilty row, or None.
        searches: Searches that found nothing.
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
        """Take in that a worker ended, or failed, while it computed this unit."""
        self.reason = reason
        if not alone:
            self.suspect = True
        elif self.search:
            self.search.ended()
        else:
            self.search = RowSearch(self.unit.rows)

    def end_search(self) -> int | None:
        """End a search that is over; the position of the row that it has found, if any."""
        if self.search is None or not self.search.is_over:
            return None
        guilty, self.search = self.search.guilty, None
        if guilty is None:
            self.searches += 1
        else:
            self.quarantined[guilty] = self.reason
        return guilty

    @property
    def hopeless(self) -> str:
        """The reason to try nothing more; empty while something is tried."""
        if self.searches >= MOST_SEARCHES:
            return f"{self.reason}, and no row of it does so alone"
        if len(self.quarantined) > MOST_GUILTY_ROWS:
            return f"more than {MOST_GUILTY_ROWS} rows of it are such that it {self.reason}"
        return ""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Running:
    """An attempt under way, and whether its worker computes nothing else meanwhile."""

    state: _UnitState
    worker: str
    alone: bool


class Schedule:
    """The units of a run; memory holds those that are worked on, and those in trouble.

    Args:
        units: What is to be scored.
        report: Called with what happens.

    Attributes:
        failed: Units that stay without a result; the run ends when there are many in a row.
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
        self._seconds: deque[float] = deque(maxlen=_REMEMBERED)
        self._store_failures = self._failed_units = 0
        self.failed: list[UnitFailed] = []

    @property
    def is_over(self) -> bool:
        """True if every unit has its result, or has failed for good."""
        return self._exhausted and not self._retries and not self._suspects and not self._running

    @property
    def workers(self) -> list[str]:
        """Names of the workers that take attempts."""
        return list(self._nodes)

    @property
    def patience_s(self) -> float:
        """Seconds without progress after which a worker hangs."""
        return max(FLOOR_S, _FACTOR * max(self._seconds)) if self._seconds else FIRST_S

    def take(self, worker: str, now: float) -> tuple[int, Attempt] | None:
        """Give a ready worker an attempt and its number; None where it should wait."""
        busy = self._busy[worker]
        if any(self._running[number].alone for number in busy):
            return None
        # A suspect waits like any other after a failure of its source or the store.
        while self._retries and self._retries[0][0] <= now and self._retries[0][2].suspect:
            self._suspects.append(heapq.heappop(self._retries)[2])
        if self._suspects and self._reserve_if_needed(worker, busy=bool(busy)):
            return None if busy else self._begin(self._suspects.popleft(), worker, alone=True)
        self._reserved.discard(worker)
        if len(busy) >= UNITS_PER_WORKER:
            return None
        state = self._next_unit(now)
        return self._begin(state, worker, alone=False) if state else None

    def handle(self, outcome: Outcome, now: float) -> None:
        """Draw the conclusions from what happened.

        Raises:
            ScoringError: Going on makes no sense: nothing can be committed, or unit after unit fails.
        """
        match outcome:
            case Ready():
                self._nodes[outcome.worker], self._busy[outcome.worker] = outcome.facts.node, set()
                self._report(WorkerReady(worker=outcome.worker, facts=outcome.facts))
            case Done(report=None):
                running = self._remove(outcome.attempt)
                if running.state.search:
                    running.state.search.survived()
                self._try_again(running.state)
            case Done(report=UnitReport() as report):
                self._remove(outcome.attempt)
                self._commit(outcome.worker, report)
            case Failed():
                self._fail(self._remove(outcome.attempt), outcome.cause, outcome.reason, now)
            case Ended():
                self._end(outcome, now)

    def _reserve_if_needed(self, worker: str, *, busy: bool) -> bool:
        """Reserve a busy worker for suspects, if there are more of them than reserved workers.

        Half of the workers are reserved at most, one at least.

        Returns:
            Whether the worker is for suspects: it is idle, or reserved and takes nothing new before it is idle.
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

    def _begin(self, state: _UnitState, worker: str, *, alone: bool) -> tuple[int, Attempt]:
        number = next(self._numbers)
        self._running[number] = _Running(state=state, worker=worker, alone=alone)
        self._busy[worker].add(number)
        attempt = Attempt(
            unit=state.unit,
            quarantined=dict(state.quarantined),
            probe=state.search.probe if state.search else None,
            outages_are_errors=state.failures[Cause.SOURCE] >= MOST_OUTAGES,
        )
        return number, attempt

    def _commit(self, worker: str, report: UnitReport) -> None:
        self._store_failures = self._failed_units = 0
        self._seconds.append(report.seconds)
        self._report(UnitCommitted(worker=worker, report=report))

    def _fail(self, running: _Running, cause: Cause, reason: str, now: float) -> None:
        state = running.state
        state.failures[cause] += 1
        if cause is Cause.ROWS:
            self._report_retry(state, reason)
            state.blame(alone=running.alone, reason=reason)
            self._try_again(state)
        elif state.failures[cause] >= _MOST_TRIES[cause]:
            self._give_up(state, reason)
        else:
            if cause is Cause.STORE:
                self._count_store_failure(reason)
            self._report_retry(state, reason)
            self._queue(state, now + min(LONGEST_WAIT_S, 0.5 * 2.0 ** state.failures[cause]))

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
            self._try_again(running.state, now)

    def _remove(self, number: int) -> _Running:
        running = self._running.pop(number)
        self._busy[running.worker].discard(number)
        return running

    def _try_again(self, state: _UnitState, now: float = 0.0) -> None:
        """Queue a unit again, with what its search has found."""
        if (position := state.end_search()) is not None:
            unit = state.unit
            self._report(RowQuarantined(unit_id=unit.id, path=unit.path, position=position, reason=state.reason))
        if state.hopeless:
            self._give_up(state, state.hopeless)
        else:
            self._queue(state, now)

    def _queue(self, state: _UnitState, due: float) -> None:
        heapq.heappush(self._retries, (due, next(self._numbers), state))

    def _report_retry(self, state: _UnitState, reason: str) -> None:
        self._report(UnitRetried(unit_id=state.unit.id, path=state.unit.path, reason=reason))

    def _count_store_failure(self, reason: str) -> None:
        self._store_failures += 1
        if self._store_failures >= MOST_STORE_FAILURES:
            raise ScoringError(f"the destination cannot be written: {reason}", hint=_HINT)

    def _give_up(self, state: _UnitState, reason: str) -> None:
        failed = UnitFailed(unit_id=state.unit.id, path=state.unit.path, reason=reason)
        self.failed.append(failed)
        self._report(failed)
        self._failed_units += 1
        if self._failed_units >= MOST_FAILED_UNITS:
            message = f"{self._failed_units} units in a row failed, the last one ({failed.path}): {failed.reason}"
            raise ScoringError(message, hint=_HINT)
