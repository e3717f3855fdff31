"""What a fleet tells its driver of attempts and workers."""

from __future__ import annotations

import mmap
import os
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from enum import StrEnum
from types import TracebackType
from typing import Protocol

import numpy as np

from graphkiln_backend.graph.dtypes import AnyArray
from graphkiln_backend.scoring.scorer import StageTimes
from graphkiln_backend.scoring.units import Unit

# What travels between the driver and its workers: attempts to score a unit, and what became of them.


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerFacts:
    """What `_run.json` says of a worker.

    Attributes:
        node: Name of its machine.
        pid: Of its process.
        session: Engine, device and precision.
        self_test: What the golden samples proved; empty without any.
        seconds: How long it took to be ready.
        version: Of graphkiln there.
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
    """What became of a unit.

    Attributes:
        unit_id: Of the unit.
        rows: How many it has.
        errors: How many of these have an error.
        seconds: From reading to the commit.
        twin: Whether another attempt had committed it before.
        times: What its stages took.
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
    """Some rows of a unit, by their positions: `start` is the first one, `stop` the one behind the last.

    Attributes:
        start: Position of the first row.
        stop: Position behind the last row.
    """

    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, kw_only=True, slots=True)
class Attempt:
    """A unit to be scored.

    Attributes:
        unit: The unit.
        quarantined: Rows that must not be touched, by their position, with the reason.
        probe: Only these rows are computed and nothing is committed: to see whether the worker survives them. None to
            score the unit.
        outages_are_errors: Whether a row that cannot be read just now is an error row, if all but few of the unit can
            be; otherwise the unit is tried again later.
        patience_s: Seconds without any progress after which the worker hangs.
    """

    unit: Unit
    quarantined: Mapping[int, str] = field(default_factory=dict)
    probe: Span | None = None
    outages_are_errors: bool = False
    patience_s: float = 60.0


# How far a worker has come, in memory that outlives it: whoever watches it sees that it goes on, or where it ended.

_SLOTS = 8
_NUMBER, _REACHED, _COMMITTING = range(3)
_WORD = np.dtype(np.int64)
_SIZE = (1 + 3 * _SLOTS) * _WORD.itemsize


class Progress:
    """A counter that grows while anything happens, and for each attempt under way the rows that were begun.

    Args:
        descriptor: Of the memory, as `create` made it; a child process inherits it.
    """

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self._memory = mmap.mmap(descriptor, _SIZE)
        words = np.frombuffer(self._memory, _WORD)
        self._counter, self._slots = words[:1], words[1:].reshape(_SLOTS, 3)

    @classmethod
    def create(cls) -> Progress:
        """New memory, without a name: it vanishes with the last process that has it."""
        descriptor = os.memfd_create("graphkiln-progress")
        os.ftruncate(descriptor, _SIZE)
        return cls(descriptor)

    def close(self) -> None:
        """Gives the memory back; a second call does nothing."""
        if self._memory.closed:
            return
        del self._counter, self._slots
        self._memory.close()
        os.close(self.descriptor)

    @property
    def counter(self) -> int:
        """Another value than before where anything has happened since."""
        return int(self._counter[0])

    @property
    def reached(self) -> dict[int, int]:
        """Rows that were begun, by the number of the attempt."""
        return {int(number): int(rows) for number, rows, _ in self._slots if number}

    @property
    def committing(self) -> frozenset[int]:
        """Attempts that are being written."""
        return frozenset(int(number) for number, _, committing in self._slots if number and committing)

    def track(self, number: int) -> Track:
        """A place for an attempt.

        Args:
            number: Of the attempt, 1 or more.
        """
        return Track(self._counter, self._slots, number)


class Track(AbstractContextManager["Track"]):
    """What one attempt tells of itself, from any thread. Made by `Progress.track`."""

    def __init__(self, counter: AnyArray, slots: AnyArray, number: int) -> None:
        free = int(np.flatnonzero(slots[:, _NUMBER] == 0)[0])
        self._counter, self._slot = counter, slots[free]
        self._slot[:] = (number, 0, 0)

    def __exit__(self, kind: type[BaseException] | None, value: object, traceback: TracebackType | None) -> None:
        self._slot[:] = 0
        self.advance()

    def advance(self) -> None:
        """Something has happened."""
        self._counter[0] += 1

    def reach(self, rows: int) -> None:
        """So many rows were begun."""
        self._slot[_REACHED] = rows
        self.advance()

    def commit(self) -> None:
        """All rows are computed: from now on none of them is to blame."""
        self._slot[_COMMITTING] = 1
        self.advance()


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
