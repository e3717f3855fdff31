"""Events of a run: for a terminal, for machines, for metrics, for `_run.json`.

Each event is reported once, in order, from the driver's thread. None of them holds anything that grows with the run.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from graphkiln_backend.scoring.outcomes import UnitReport, WorkerFacts


@dataclass(frozen=True, kw_only=True, slots=True)
class RunPlanned:
    """The plan is known; workers are started next, if anything is left.

    Attributes:
        configuration: Digest of the model and of all that changes an answer.
        units: Units of the whole input.
        rows: Rows of the whole input.
        size_bytes: Bytes of the whole input, where that is known.
        done_units: Those of them that had a result before.
        done_rows: Rows of those.
        run_id: What the run is called.
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
    """A node takes part.

    Attributes:
        workers: How many are started on it.
    """

    node: str
    workers: int


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeLost:
    """A node is gone; what its workers had begun is done elsewhere."""

    node: str


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeRefused:
    """A node takes no part: it cannot, or its workers failed too often.

    Attributes:
        reason: Why, and what to do.
    """

    node: str
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerReady:
    """A worker has proven its session.

    Attributes:
        worker: Its name in this run.
    """

    worker: str
    facts: WorkerFacts


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerEnded:
    """A worker ended or was ended, or could not start; it is replaced.

    Attributes:
        worker: Its name in this run.
        node: Name of its machine.
        reason: Why.
        unfit: Whether it was its own fault: its self-test or a replay of the golden samples failed.
    """

    worker: str
    node: str
    reason: str
    unfit: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class UnitCommitted:
    """A unit has its result; reported once for each.

    Attributes:
        worker: Which one computed it.
        report: The figures; `report.twin` where an earlier attempt had committed it.
    """

    worker: str
    report: UnitReport


@dataclass(frozen=True, kw_only=True, slots=True)
class UnitRetried:
    """An attempt came to nothing; the unit is tried again.

    Attributes:
        path: What it is a range of.
        reason: What happened.
    """

    unit_id: str
    path: str
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class RowQuarantined:
    """A row that ends its worker was found; it gets an error, the rest of its unit is scored.

    Attributes:
        path: What it is a range of.
        position: Position of the row in its unit; the result has its id.
        reason: What it does.
    """

    unit_id: str
    path: str
    position: int
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class UnitFailed:
    """A unit stays without a result: the run goes on with the others and ends with an error.

    Attributes:
        path: What it is a range of.
        reason: Why.
    """

    unit_id: str
    path: str
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class RunFinished:
    """The destination was checked: each row of the input is accounted for."""

    summary: Summary


@dataclass(slots=True)
class Summary:
    """Figures of a run.

    Attributes:
        units: Units of the input.
        rows: Rows of the input.
        done_before: Units that had a result when the run began.
        scored: Rows that this run answered.
        errors: Rows that this run gave an error.
        quarantined: Those of them that ended a worker.
        twins: Units that an earlier attempt had committed, whose worker did not live to report it.
        retries: Attempts that came to nothing.
        workers_ended: Workers that were replaced.
    """

    units: int = 0
    rows: int = 0
    done_before: int = 0
    scored: int = 0
    errors: int = 0
    quarantined: int = 0
    twins: int = 0
    retries: int = 0
    workers_ended: int = 0


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
