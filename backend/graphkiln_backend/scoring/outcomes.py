"""Messages between the driver and its workers: attempts to score a unit, and their outcomes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

from graphkiln_backend.scoring.scorer import StageTimes
from graphkiln_backend.scoring.units import Unit


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerFacts:
    """A worker as `_run.json` describes it.

    Attributes:
        node: Name of its machine.
        pid: Process id.
        session: Engine, device and precision.
        self_test: Report of the golden samples as JSON; empty without any.
        seconds: How long it took to be ready.
        version: Version of graphkiln there.
        configuration: Digest of the model and of all that changes an answer, as it found them.
    """

    node: str
    pid: int
    session: str
    self_test: str
    seconds: float
    version: str = ""
    configuration: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class UnitReport:
    """A unit that was committed.

    Attributes:
        errors: How many of these have an error.
        seconds: From reading to the commit.
        twin: Whether another attempt had committed it before.
        times: Seconds of its stages.
        quarantined: Reasons by the ids of rows that were not touched.
        example: The first of the errors; empty without any.
    """

    unit_id: str
    rows: int
    errors: int
    seconds: float
    twin: bool = False
    times: StageTimes = field(default_factory=StageTimes)
    quarantined: Mapping[str, str] = field(default_factory=dict)
    example: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Span:
    """Rows of a unit by their positions, from `start` to before `stop`."""

    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, kw_only=True, slots=True)
class Attempt:
    """A unit to be scored.

    Attributes:
        quarantined: Rows that must not be touched, by their position, with the reason.
        probe: Only these rows are computed and nothing is committed, to see whether the worker survives them. None to
            score the unit.
        outages_are_errors: Whether a row that cannot be read just now is an error row, if all but few of the unit can
            be; otherwise the unit is tried again later.
    """

    unit: Unit
    quarantined: Mapping[int, str] = field(default_factory=dict)
    probe: Span | None = None
    outages_are_errors: bool = False


class Cause(StrEnum):
    """Reasons of attempts that came to nothing while their worker goes on; where it is gone, `Blame` says why."""

    CHANGED = "changed"  # the input is no longer what was planned
    UNREADABLE = "unreadable"  # the unit cannot be read at all
    SOURCE = "source"  # the input cannot be read just now
    STORE = "store"  # the destination cannot be written just now
    REFUSED = "refused"  # the destination will never take such a result
    ROWS = "rows"  # computing its rows failed, and the session is sound
    COMMIT = "commit"  # the worker ended while the result was written: the one cause that the driver itself gives


@dataclass(frozen=True, kw_only=True, slots=True)
class Done:
    """An attempt that came to its end; `report` is None for a probe."""

    worker: str
    attempt: int
    report: UnitReport | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Failed:
    """An attempt that came to nothing; its worker goes on."""

    worker: str
    attempt: int
    cause: Cause
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Ready:
    """A worker that takes attempts from now on."""

    worker: str
    facts: WorkerFacts


class Blame(StrEnum):
    """Possible reasons of the end of a worker, and so of all its attempts; see `Cause` for one that goes on."""

    ROWS = "rows"  # it ended or hung while its node lives: a row may have done it
    WORKER = "worker"  # it computes wrongly, or cannot start: its rows have nothing to do with it
    NODE = "node"  # its node is gone


@dataclass(frozen=True, kw_only=True, slots=True)
class Ended:
    """A worker that is no more, and neither is any attempt that it had.

    Attributes:
        blame: What may be the reason.
        reason: What it did, such as `hung for 60 s`.
        committing: Attempts that were being written to the destination: all of their rows were computed.
    """

    worker: str
    blame: Blame
    reason: str
    committing: frozenset[int] = frozenset()


Outcome = Done | Failed | Ready | Ended


class Fleet(Protocol):
    """Workers, wherever they are: `RayFleet` on a cluster."""

    def assign(self, worker: str, number: int, attempt: Attempt) -> None:
        """Give a worker that is ready an attempt; outcomes have its number."""
        ...

    def wait(self, timeout_s: float, patience_s: float) -> Sequence[Outcome]:
        """Return what has happened since, and replace workers meanwhile.

        Args:
            timeout_s: How long to wait for something to happen.
            patience_s: Seconds without progress after which a worker that has attempts hangs.

        Raises:
            ScoringError: No worker can be had.
        """
        ...
