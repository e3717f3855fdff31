"""Errors of whole data sets."""

from __future__ import annotations

import signal

from graphkiln_backend.graph.errors import GraphkilnError


class ScoringError(GraphkilnError):
    """A data set cannot be scored as requested: its source, its destination, or existing results."""

    triton_code = "INVALID_ARG"
    exit_code = 2


class InputChanged(ScoringError):
    """The input is no longer what was planned; the unit is left to the next run."""


class SourceUnavailable(ScoringError):
    """The input cannot be read just now: network, service, disk. No row is to blame; the unit is tried again."""

    triton_code = "UNAVAILABLE"


class UnitUnreadable(ScoringError):
    """A unit cannot be read at all: what its rows are is not known."""


class WorkerUnfit(ScoringError):
    """A worker computes wrongly, or not what the run computes: it is replaced, its units are computed by others."""


class RunInterrupted(ScoringError):
    """A run was ended by a signal.

    Args:
        number: Number of the signal.
    """

    def __init__(self, number: int) -> None:
        super().__init__(
            f"ended by {signal.Signals(number).name}", hint="what was committed stays; run the same command to go on"
        )
        self.number = number
        self.exit_code = 128 + number  # type: ignore[misc]  # as a shell tells it


class CommitConflict(ScoringError):
    """A unit has a result already, of another attempt: this one is discarded."""


class StoreError(ScoringError):
    """A destination fails whatever is written to it: no row is to blame, and no unit is lost by trying again.

    Args:
        message: What happened.
        hint: What to do.
        passing: Whether it may be over without anybody's doing: the network, a service that is busy.
    """

    triton_code = "UNAVAILABLE"
    exit_code = 1

    def __init__(self, message: str, *, hint: str = "", passing: bool = False) -> None:
        super().__init__(message, hint=hint)
        self.passing = passing


class DestinationBusy(ScoringError):
    """Another run is writing there; the message names it and its machine."""


class ClaimLost(ScoringError):
    """Another run took the destination over, since this one was not heard of for too long."""
