"""Finds the row that ends its worker: by halving, with a guess where to begin.

Nothing is believed that was not seen: a row is guilty when a worker that computes it alone ends twice.
"""

from __future__ import annotations

from graphkiln_backend.scoring.attempts import Span

CONFIRMATIONS = 2
"""A worker may end for a reason of its own: a row that ends two of them, alone, is guilty."""


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
