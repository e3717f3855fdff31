"""Ends a run when going on makes no sense: nothing can be committed, or unit after unit fails."""

from __future__ import annotations

from graphkiln_backend.scoring.errors import ScoringError
from graphkiln_backend.scoring.events import UnitFailed

MOST_STORE_FAILURES = 4
"""In a row, with no commit between them; a worker has been patient with the store each time."""
MOST_FAILED_UNITS = 5
"""In a row: then it is not the units."""
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
