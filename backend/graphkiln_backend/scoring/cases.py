"""What is known of a unit that is not committed yet: what it was blamed for, and what to try next."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from graphkiln_backend.scoring.attempts import Attempt, Span
from graphkiln_backend.scoring.outcomes import Cause
from graphkiln_backend.scoring.suspects import RowSearch
from graphkiln_backend.scoring.units import Unit

MOST_GUILTY_ROWS = 50
"""A unit with more of them has another problem than its rows."""
MOST_SEARCHES = 3
"""Searches of a unit that find no row, although its worker ends."""
MOST_CHANGES = 3
"""Times that a unit is planned anew; after that, rows that change are errors."""
MOST_OUTAGES = 7
"""Attempts that end because a row cannot be read just now, two minutes together; in the one after them that row is an
error: a disk that cannot read one block, or an object whose service always fails, must not keep the others."""
MOST_LOSSES = 3
"""Workers that ended for a reason unknown before the unit is a suspect."""
_GUESS_ROWS = 64
"""Rows that a worker has in flight, about: it ended because of one of the last that it began, probably."""


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
        changes: How often its input changed.
        failures: Attempts that came to nothing, by cause.
        done: Whether it has its result.
        in_flight: Attempts under way.
        reason: What happened last.
    """

    unit: Unit
    quarantined: dict[int, str] = field(default_factory=dict)
    suspect: bool = False
    search: RowSearch | None = None
    searches: int = 0
    losses: int = 0
    changes: int = 0
    failures: Counter[Cause] = field(default_factory=Counter)
    done: bool = False
    in_flight: int = 0
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
            changes_are_errors=self.changes >= MOST_CHANGES,
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
