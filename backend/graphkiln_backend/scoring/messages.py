"""Messages of a run: attempts to score a unit, their outcomes, and the events that follow.

The driver gives a worker an `Attempt`; a worker answers with an `Outcome`. What follows is reported as an `Event` to
the terminal, to metrics and to `_run.json`: once each, in order, from the driver's thread.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from enum import StrEnum

from graphkiln_backend.scoring.units import Unit


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


@dataclass(frozen=True, kw_only=True, slots=True)
class StageTimes:
    """Seconds of each stage of some units. Stages overlap: their sum is no elapsed time.

    Attributes:
        read_s: Elapsed while rows were read, summed over all readers: what a store takes to answer.
        decode_s: Processor time of decoding and preprocessing.
        wait_s: Elapsed while a batch waited for its rows: what faster reading or more cores for decoding would save.
        compute_s: Elapsed in the session.
        encode_s: Processor time of making columns from outputs.
        commit_s: Elapsed in the destination.
    """

    read_s: float = 0.0
    decode_s: float = 0.0
    wait_s: float = 0.0
    compute_s: float = 0.0
    encode_s: float = 0.0
    commit_s: float = 0.0

    def __add__(self, other: StageTimes) -> StageTimes:
        """Add the stages of other units."""
        names = [each.name for each in fields(self)]
        return StageTimes(**{name: getattr(self, name) + getattr(other, name) for name in names})


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerFacts:
    """A worker as `_run.json` describes it.

    Attributes:
        node: Name of its machine.
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
        errors: How many of the rows have an error.
        seconds: From reading to the commit.
        twin: Whether it was committed before: by another attempt, or by this one, whose first write failed at its end.
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


class Cause(StrEnum):
    """Reasons of attempts that came to nothing while their worker goes on; where it is gone, `Blame` says why."""

    CHANGED = "changed"  # the input is no longer what was planned
    UNREADABLE = "unreadable"  # the unit cannot be read at all
    SOURCE = "source"  # the input cannot be read just now
    STORE = "store"  # the destination cannot be written just now
    REFUSED = "refused"  # the destination will never take such a result
    ROWS = "rows"  # computing its rows failed, and the session is sound
    COMMIT = "commit"  # the worker ended while the result was written: the one cause that the driver itself gives


class Blame(StrEnum):
    """Possible reasons of the end of a worker, and so of all its attempts."""

    ROWS = "rows"  # it ended or hung while its node lives: a row may have done it
    WORKER = "worker"  # it computes wrongly, or cannot start: its rows have nothing to do with it
    NODE = "node"  # its node is gone


@dataclass(frozen=True, kw_only=True, slots=True)
class Ready:
    """A worker that takes attempts from now on."""

    worker: str
    facts: WorkerFacts


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


Outcome = Ready | Done | Failed | Ended


@dataclass(frozen=True, kw_only=True, slots=True)
class RunPlanned:
    """The plan is known; workers are started next, if anything is left.

    Attributes:
        configuration: Digest of the model and of all that changes an answer.
        units: Units of the whole input.
        rows: Rows of the whole input.
        size_bytes: Bytes of the whole input, where that is known.
        done_units: Units that had a result before.
        done_rows: Rows of those.
        removed_units: Results of an input that changed since, removed with `--replace`.
    """

    configuration: str
    units: int
    rows: int
    size_bytes: int
    done_units: int
    done_rows: int
    removed_units: int = 0
    run_id: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeJoined:
    """A node takes part, with so many workers."""

    node: str
    workers: int


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeLost:
    """A node is gone; what its workers had begun is done elsewhere."""

    node: str


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeRefused:
    """A node takes no part: it cannot, or its workers failed too often; `reason` says what to do."""

    node: str
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerReady:
    """A worker has proven its session."""

    worker: str
    facts: WorkerFacts


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerEnded:
    """A worker ended or was ended, or could not start; it is replaced.

    Attributes:
        unfit: Whether it was its own fault: its self-test or a replay of the golden samples failed.
    """

    worker: str
    node: str
    reason: str
    unfit: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class UnitCommitted:
    """A unit has its result; reported once for each, with `report.twin` where an earlier attempt had committed it."""

    worker: str
    report: UnitReport


@dataclass(frozen=True, kw_only=True, slots=True)
class UnitRetried:
    """An attempt came to nothing; the unit, a range of `path`, is tried again."""

    unit_id: str
    path: str
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class RowQuarantined:
    """A row that ends its worker was found, by its position in the unit; it gets an error, the rest is scored."""

    unit_id: str
    path: str
    position: int
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class UnitFailed:
    """A unit stays without a result: the run goes on with the others and ends with an error."""

    unit_id: str
    path: str
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class RunFinished:
    """The destination was checked: each unit of the plan is committed, or has failed. Contents are not read."""


Event = (
    RunPlanned
    | NodeJoined
    | NodeLost
    | NodeRefused
    | WorkerReady
    | WorkerEnded
    | UnitCommitted
    | UnitRetried
    | RowQuarantined
    | UnitFailed
    | RunFinished
)
Report = Callable[[Event], None]
