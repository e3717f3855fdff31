"""What a fleet tells its driver of attempts and workers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

from graphkiln_backend.scoring.attempts import Attempt, UnitReport, WorkerFacts


class Cause(StrEnum):
    """Why an attempt came to nothing while its worker goes on."""

    CHANGED = "changed"  # the input is no longer what was planned
    UNREADABLE = "unreadable"  # the unit cannot be read at all, whoever tries
    SOURCE = "source"  # the input cannot be read just now
    STORE = "store"  # the destination cannot be written just now
    REFUSED = "refused"  # the destination will never take such a result
    ROWS = "rows"  # computing its rows failed, and the session is sound


@dataclass(frozen=True, kw_only=True, slots=True)
class Done:
    """An attempt came to its end.

    Attributes:
        worker: Name of the worker.
        attempt: Number of the attempt.
        report: What was committed; None for a probe.
    """

    worker: str
    attempt: int
    report: UnitReport | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Failed:
    """An attempt came to nothing; its worker goes on.

    Attributes:
        worker: Name of the worker.
        attempt: Number of the attempt.
        cause: What kind of thing happened.
        reason: In words.
    """

    worker: str
    attempt: int
    cause: Cause
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Ready:
    """A worker takes attempts from now on.

    Attributes:
        worker: Its name.
        facts: What it is.
    """

    worker: str
    facts: WorkerFacts


class Blame(StrEnum):
    """Whose fault it may be that a worker ended."""

    ROWS = "rows"  # its process ended by itself or had to be ended while it computed: a row may have done it
    WORKER = "worker"  # it computes wrongly, or cannot start: its rows have nothing to do with it
    NODE = "node"  # its node is gone
    UNKNOWN = "unknown"  # it was ended from outside, with its node alive


@dataclass(frozen=True, kw_only=True, slots=True)
class Ended:
    """A worker is no more, and neither is any attempt that it had.

    Attributes:
        worker: Its name.
        blame: Whose fault it may be.
        reason: What it did, such as `ended its worker with SIGSEGV`.
        reached: How many rows of each attempt were begun, by its number; only where that is known.
        committing: Attempts that were being written to the destination, and so ended no worker by their rows.
    """

    worker: str
    blame: Blame
    reason: str
    reached: Mapping[int, int] = field(default_factory=dict)
    committing: frozenset[int] = frozenset()


Outcome = Done | Failed | Ready | Ended


class Fleet(Protocol):
    """Workers, wherever they are: `RayFleet` on a cluster."""

    def assign(self, worker: str, number: int, attempt: Attempt) -> None:
        """Gives a worker something to do.

        Args:
            worker: One that is ready.
            number: Of the attempt; outcomes name it.
            attempt: The attempt.
        """
        ...

    def wait(self, timeout_s: float) -> Sequence[Outcome]:
        """What has happened since, at most after some time; it replaces workers meanwhile.

        Raises:
            ScoringError: No worker can be had.
        """
        ...
