"""Which worker tries which unit next, and what follows from what became of it. Nothing in here knows Ray, or waits.

A worker computes two units at a time: one is read while the other is computed. When it ends, both are suspects. A
suspect is computed by a worker that has nothing else to do; if that one ends, too, the guilty row is searched
(`suspects`), quarantined, and the rest of the unit is scored. What happens to a node, to a store, or to a worker that
computes wrongly is never blamed on rows.
"""

from __future__ import annotations

import heapq
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import count

from graphkiln_backend.scoring.errors import ScoringError
from graphkiln_backend.scoring.events import (
    Event,
    RowQuarantined,
    Summary,
    UnitCommitted,
    UnitFailed,
    UnitRetried,
    WorkerEnded,
    WorkerReady,
)
from graphkiln_backend.scoring.outcomes import (
    Attempt,
    Blame,
    Cause,
    Done,
    Ended,
    Failed,
    Outcome,
    Ready,
    Span,
    UnitReport,
)
from graphkiln_backend.scoring.units import Unit

# How long a worker may be silent before it hangs, from how fast units are computed.

FLOOR_S = 60.0  # no worker hangs before: a store may take its time to answer a read, and retries it
FIRST_S = 600.0  # until a unit was measured: the first batch may compile kernels
_FACTOR = 3.0
_REMEMBERED = 50


class Patience:
    """Seconds without progress after which a worker is ended.

    A worker makes progress with each row that it begins and with each stage of a unit that it ends, so that a slow unit
    is none that hangs. Three times as long as the slowest of the last units took as a whole, and a minute at least.
    """

    def __init__(self) -> None:
        self._seconds: deque[float] = deque(maxlen=_REMEMBERED)

    def learn(self, seconds: float) -> None:
        """A unit was computed in so many seconds."""
        self._seconds.append(seconds)

    @property
    def seconds(self) -> float:
        """The limit now."""
        return max(FLOOR_S, _FACTOR * max(self._seconds)) if self._seconds else FIRST_S


# Ends a run when going on makes no sense: nothing can be committed, or unit after unit fails.

MOST_STORE_FAILURES = 4  # in a row, with no commit between them; a worker has been patient with the store each time
MOST_FAILED_UNITS = 5  # in a row: then it is not the units
_HINT = "what was committed stays; run the same command to go on"


class Breaker:
    """Counts what fails without a commit in between."""

    def __init__(self) -> None:
        self._store_failures = self._failed_units = 0

    def count_commit(self) -> None:
        """Something works."""
        self._store_failures = self._failed_units = 0

    def count_store_failure(self, reason: str) -> None:
        """The destination failed.

        Raises:
            ScoringError: It did so too often.
        """
        self._store_failures += 1
        if self._store_failures >= MOST_STORE_FAILURES:
            raise ScoringError(f"the destination cannot be written: {reason}", hint=_HINT)

    def count_failed_unit(self, failed: UnitFailed) -> None:
        """A unit failed for good.

        Raises:
            ScoringError: Too many did.
        """
        self._failed_units += 1
        if self._failed_units >= MOST_FAILED_UNITS:
            message = f"{self._failed_units} units in a row failed, the last one ({failed.path}): {failed.reason}"
            raise ScoringError(message, hint=_HINT)


# What is known of a unit that is not committed yet: what it was blamed for, and what to try next.

# Finds the row that ends its worker: by halving, with a guess where to begin.
#
# Nothing is believed that was not seen: a row is guilty when a worker that computes it alone ends twice.

CONFIRMATIONS = 2  # A worker may end for a reason of its own: a row that ends two of them, alone, is guilty


class RowSearch:
    """A search for one guilty row in a unit that ended its worker.

    `probe` says what to compute next; `survived` and `ended` what became of it. Of two halves only the first is probed:
    where it is innocent, the row is in the other one, which the end proves.

    Args:
        rows: How many the unit has.
        guess: Where the worker was when it ended; None to begin with all rows.
    """

    def __init__(self, rows: int, guess: Span | None = None) -> None:
        self._suspects = Span(start=0, stop=rows)
        self._guess = guess if guess and 0 < len(guess) < rows else None
        self._confirmed = 0
        self.guilty: int | None = None
        """Position of the guilty row, once it is known."""
        self.inconclusive = rows == 0
        """Whether no single row does it: the worker ended for another reason, or because of several rows together."""

    @property
    def is_over(self) -> bool:
        """Whether there is nothing left to probe."""
        return self.inconclusive or self.guilty is not None

    @property
    def probe(self) -> Span:
        """What to compute next."""
        if self._guess:
            return self._guess
        start, stop = self._suspects.start, self._suspects.stop
        return self._suspects if stop - start == 1 else Span(start=start, stop=(start + stop) // 2)

    def survived(self) -> None:
        """The worker computed the probe."""
        if self._guess:
            self._guess = None
        elif len(self._suspects) == 1:
            self.inconclusive = True
        else:
            self._suspects = Span(start=self.probe.stop, stop=self._suspects.stop)

    def ended(self) -> None:
        """The worker ended while it computed the probe."""
        self._suspects, self._guess = self.probe, None
        if len(self._suspects) == 1:
            self._confirmed += 1
            if self._confirmed == CONFIRMATIONS:
                self.guilty = self._suspects.start


MOST_GUILTY_ROWS = 50  # A unit with more of them has another problem than its rows
MOST_SEARCHES = 3  # searches of a unit that find no row, although its worker ends
# Attempts that end because a row cannot be read just now, two minutes together; in the one after them that row is an
# error: a disk that cannot read one block, or an object whose service always fails, must not keep the others.
MOST_OUTAGES = 7
MOST_LOSSES = 3  # workers that ended for a reason unknown before the unit is a suspect
# Rows that a worker has in flight, about: it ended because of one of the last that it began, probably.
_GUESS_ROWS = 64


@dataclass(slots=True)
class Case:
    """A unit on its way to its result.

    Attributes:
        unit: The unit.
        quarantined: Its guilty rows, with what they do.
        suspect: Whether it is computed alone, because a worker ended with it.
        search: For the guilty row; None while none is looked for.
        searches: How many have found nothing.
        losses: Workers that ended with it for a reason unknown.
        failures: Attempts that came to nothing, by cause.
        reason: What happened last.
    """

    unit: Unit
    quarantined: dict[int, str] = field(default_factory=dict)
    suspect: bool = False
    search: RowSearch | None = None
    searches: int = 0
    losses: int = 0
    failures: Counter[Cause] = field(default_factory=Counter)
    reason: str = ""

    def attempt(self, patience_s: float) -> Attempt:
        """What to try next.

        Args:
            patience_s: Seconds without any progress after which the worker hangs.
        """
        return Attempt(
            unit=self.unit,
            quarantined=dict(self.quarantined),
            probe=self.search.probe if self.search else None,
            outages_are_errors=self.failures[Cause.SOURCE] >= MOST_OUTAGES,
            patience_s=patience_s,
        )

    def blame(self, attempt: Attempt, *, alone: bool, reached: int | None, reason: str) -> None:
        """A worker ended, or failed, while it computed an attempt.

        Args:
            attempt: What it computed.
            alone: Whether nothing else was computed by it.
            reached: How many rows it had begun, where that is known.
            reason: What it did.
        """
        self.reason = reason
        if not alone:
            self.suspect = True
        elif attempt.probe and self.search:
            self.search.ended()
        else:
            guess = Span(start=max(0, reached - _GUESS_ROWS), stop=reached) if reached else None
            self.search = RowSearch(self.unit.rows, guess)

    def conclude(self) -> int | None:
        """Ends a search that is over; the position of the row that it has found, if any."""
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
        """Why nothing more is tried; empty while something is."""
        if self.searches >= MOST_SEARCHES:
            return f"{self.reason}, and no row of it does so alone"
        if len(self.quarantined) > MOST_GUILTY_ROWS:
            return f"more than {MOST_GUILTY_ROWS} rows of it are such that it {self.reason}"
        return ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Running:
    """An attempt under way.

    Attributes:
        case: Of its unit.
        attempt: The attempt.
        worker: Which one computes it.
        begun: When, by the clock of the driver.
        alone: Whether the worker computes nothing else meanwhile.
    """

    case: Case
    attempt: Attempt
    worker: str
    begun: float
    alone: bool


def wait_s(failures: Mapping[Cause, int], cause: Cause) -> float:
    """Seconds before a unit is tried again: twice as long each time, a minute at most."""
    return min(60.0, 0.5 * 2.0 ** failures.get(cause, 0))


UNITS_PER_WORKER = 2  # one is read while the other is computed
# Attempts of a unit that end for the same cause; a store that fails ends the run (`breaker`).
_MOST_TRIES = {
    Cause.CHANGED: 1,
    Cause.UNREADABLE: 3,
    Cause.SOURCE: MOST_OUTAGES + 1,
    Cause.REFUSED: 1,
    Cause.STORE: 1000,
}


class Schedule:
    """The units of a run until each is committed; memory holds those that are worked on, and those in trouble.

    Args:
        units: What is to be scored.
        tell: Told what happens.
        summary: Where it is counted.
    """

    def __init__(
        self,
        units: Iterator[Unit],
        tell: Callable[[Event], None],
        summary: Summary,
    ) -> None:
        self._units, self._tell, self.summary = units, tell, summary
        self._exhausted = False
        self._numbers = count(1)
        self._retries: list[tuple[float, int, Case]] = []
        self._suspects: deque[Case] = deque()
        self._running: dict[int, Running] = {}
        self._busy: dict[str, set[int]] = {}
        self._nodes: dict[str, str] = {}
        self._reserved: set[str] = set()
        self._patience = Patience()
        self._breaker = Breaker()
        self.failed: list[UnitFailed] = []
        """Units that stay without a result; the run ends when there are many."""

    @property
    def is_over(self) -> bool:
        """Whether every unit has its result, or has failed for good."""
        return self._exhausted and not self._retries and not self._suspects and not self._running

    @property
    def workers(self) -> list[str]:
        """Those that take attempts."""
        return list(self._nodes)

    def take(self, worker: str, now: float) -> tuple[int, Attempt] | None:
        """What a worker should begin now, with its number; None where it should wait.

        Args:
            worker: A worker that is ready.
            now: The clock.
        """
        busy = self._busy[worker]
        if any(self._running[number].alone for number in busy):
            return None
        if self._suspects and self._keeps_free(worker, busy=bool(busy)):
            return None if busy else self._begin(self._suspects.popleft(), worker, now, alone=True)
        self._reserved.discard(worker)
        if len(busy) >= UNITS_PER_WORKER:
            return None
        case = self._next_case(now)
        return self._begin(case, worker, now, alone=False) if case else None

    def handle(self, outcome: Outcome, now: float) -> None:
        """Draws the conclusions from what happened.

        Raises:
            ScoringError: Going on makes no sense: nothing can be committed, or unit after unit fails.
        """
        match outcome:
            case Ready():
                self._nodes[outcome.worker], self._busy[outcome.worker] = outcome.facts.node, set()
                self._tell(WorkerReady(worker=outcome.worker, facts=outcome.facts))
            case Done():
                self._finish(self._remove(outcome.attempt), outcome)
            case Failed():
                self._fail(self._remove(outcome.attempt), outcome, now)
            case Ended():
                self._end(outcome, now)

    # ---- what is next

    def _keeps_free(self, worker: str, *, busy: bool) -> bool:
        """Whether a worker is, or shall be, free for suspects: half of the workers at most, one at least."""
        if worker in self._reserved or not busy:
            return True
        if len(self._reserved) >= min(len(self._suspects), max(1, len(self._nodes) // 2)):
            return False
        self._reserved.add(worker)
        return True

    def _next_case(self, now: float) -> Case | None:
        if self._retries and self._retries[0][0] <= now:
            return heapq.heappop(self._retries)[2]
        unit = None if self._exhausted else next(self._units, None)
        self._exhausted = unit is None
        return Case(unit=unit) if unit else None

    def _begin(self, case: Case, worker: str, now: float, *, alone: bool) -> tuple[int, Attempt]:
        attempt, number = case.attempt(self._patience.seconds), next(self._numbers)
        self._running[number] = Running(case=case, attempt=attempt, worker=worker, begun=now, alone=alone)
        self._busy[worker].add(number)
        return number, attempt

    # ---- what follows

    def _finish(self, running: Running, outcome: Done) -> None:
        case = running.case
        if outcome.report is None:
            if case.search:
                case.search.survived()
            self._conclude(case)
        else:
            self._commit(outcome.worker, outcome.report)

    def _commit(self, worker: str, report: UnitReport) -> None:
        self._breaker.count_commit()
        self._patience.learn(report.seconds)
        self.summary.scored += report.rows - report.errors
        self.summary.errors += report.errors
        self.summary.quarantined += len(report.quarantined)
        self.summary.twins += report.twin
        self._tell(UnitCommitted(worker=worker, report=report))

    def _fail(self, running: Running, outcome: Failed, now: float) -> None:
        case = running.case
        case.failures[outcome.cause] += 1
        if outcome.cause is Cause.ROWS:
            self._retry(case, outcome.reason)
            case.blame(running.attempt, alone=running.alone, reached=None, reason=outcome.reason)
            self._conclude(case)
        elif case.failures[outcome.cause] >= _MOST_TRIES[outcome.cause]:
            self._give_up(case, outcome.reason)
        else:
            if outcome.cause is Cause.STORE:
                self._breaker.count_store_failure(outcome.reason)
            self._retry(case, outcome.reason)
            self._queue(case, now + wait_s(case.failures, outcome.cause))

    def _end(self, outcome: Ended, now: float) -> None:
        node = self._nodes.pop(outcome.worker, "")
        self._reserved.discard(outcome.worker)
        self.summary.workers_ended += 1
        unfit = outcome.blame is Blame.WORKER
        self._tell(WorkerEnded(worker=outcome.worker, node=node, reason=outcome.reason, unfit=unfit))
        for number in sorted(self._busy.get(outcome.worker, ())):
            self._lose(number, self._remove(number), outcome, now)
        self._busy.pop(outcome.worker, None)

    def _lose(self, number: int, running: Running, outcome: Ended, now: float) -> None:
        case = running.case
        if number in outcome.committing:
            failed = Failed(worker=outcome.worker, attempt=number, cause=Cause.STORE, reason=outcome.reason)
            self._fail(running, failed, now)
        else:
            self._retry(case, outcome.reason)
            if outcome.blame is Blame.ROWS:
                reached = outcome.reached.get(number)
                case.blame(running.attempt, alone=running.alone, reached=reached, reason=outcome.reason)
            elif outcome.blame is Blame.UNKNOWN:
                case.losses += 1
                case.suspect = case.suspect or case.losses >= MOST_LOSSES
            self._conclude(case, now)

    def _remove(self, number: int) -> Running:
        running = self._running.pop(number)
        self._busy[running.worker].discard(number)
        return running

    def _conclude(self, case: Case, now: float = 0.0) -> None:
        """Tries a unit again, with what its search has found."""
        if (position := case.conclude()) is not None:
            unit = case.unit
            self._tell(RowQuarantined(unit_id=unit.id, path=unit.path, position=position, reason=case.reason))
        if case.hopeless:
            self._give_up(case, case.hopeless)
        else:
            self._queue(case, now)

    def _queue(self, case: Case, due: float) -> None:
        if case.suspect:
            self._suspects.append(case)
        else:
            heapq.heappush(self._retries, (due, next(self._numbers), case))

    def _retry(self, case: Case, reason: str) -> None:
        self.summary.retries += 1
        self._tell(UnitRetried(unit_id=case.unit.id, path=case.unit.path, reason=reason))

    def _give_up(self, case: Case, reason: str) -> None:
        failed = UnitFailed(unit_id=case.unit.id, path=case.unit.path, reason=reason)
        self.failed.append(failed)
        self._tell(failed)
        self._breaker.count_failed_unit(failed)
