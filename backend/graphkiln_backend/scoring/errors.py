"""Errors of scoring runs."""

from __future__ import annotations

import signal

from graphkiln_backend.graph.errors import GraphkilnError


class ScoringError(GraphkilnError):
    """A data set cannot be scored as requested: its source, its destination, or existing results."""

    triton_code = "INVALID_ARG"
    exit_code = 2


class InputChanged(ScoringError):
    """The input differs from the plan; the unit is left to the next run."""


class SourceUnavailable(ScoringError):
    """Temporary failure of a source: network, service or disk. The unit is tried again."""

    triton_code = "UNAVAILABLE"


class UnitUnreadable(ScoringError):
    """A unit cannot be read, so that its rows are not known."""


class WorkerUnfit(ScoringError):
    """A worker computes wrong answers; it is replaced, and its units are computed again."""


class RunInterrupted(ScoringError):
    """A run was ended by a signal.

    Args:
        number: Signal number.
    """

    def __init__(self, number: int) -> None:
        super().__init__(
            f"ended by {signal.Signals(number).name}", hint="what was committed stays; run the same command to go on"
        )
        self.number = number
        self.exit_code = 128 + number  # type: ignore[misc]  # the convention of shells


class CommitConflict(ScoringError):
    """The unit already has a result; the new one is discarded."""


class StoreError(ScoringError):
    """A destination fails, whatever is written to it.

    Args:
        message: What happened.
        hint: What to do.
        passing: True if a retry may succeed: a network error, a busy service.
    """

    triton_code = "UNAVAILABLE"
    exit_code = 1

    def __init__(self, message: str, *, hint: str = "", passing: bool = False) -> None:
        super().__init__(message, hint=hint)
        self.passing = passing


class DestinationBusy(ScoringError):
    """Another run writes to the destination."""


class LockLost(ScoringError):
    """Another run took the lock of the destination, because this one did not renew it in time."""
