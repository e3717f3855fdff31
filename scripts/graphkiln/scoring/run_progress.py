"""How far a run is: one snapshot, which the terminal shows and `--progress json` prints.

A line of `--progress json` is a `Progress` as JSON. `schema` changes when a key goes or means something else; new keys
may come without.
"""

from __future__ import annotations

from dataclasses import dataclass, field

SCHEMA = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerProgress:
    """A worker so far.

    Attributes:
        node: Name of its machine.
        pid: Of its process.
        session: Engine, device and precision.
        units: Committed by it.
        rows: In these.
        rows_per_s: While it worked.
        ended: Why it is no longer there; empty while it is.
    """

    node: str
    pid: int
    session: str
    units: int = 0
    rows: int = 0
    rows_per_s: float = 0.0
    ended: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """A run so far.

    Attributes:
        schema: Of this object.
        event: What just happened: `begun`, `planned`, `node`, `worker`, `unit`, `twin`, `retry`, `replanned`,
            `quarantine`, `failed` (a unit stays without a result), `finished` (each row is accounted for).
        message: The same in words, for a person; empty where the figures say it all.
        seconds: Since the run was started.
        units: Of the plan.
        units_before: Of these, committed by earlier runs.
        units_done: Of these, committed by this run.
        rows: Of the plan.
        rows_before: Of these, answered by earlier runs.
        rows_done: Of these, answered by this run, errors included.
        errors: Rows of this run that have an error.
        quarantined: Of these, rows that ended a worker.
        retries: Attempts that failed and were made again.
        rows_per_s: Of the last minute.
        seconds_left: At the rate of the whole run; None where that is not known yet.
        workers: Each worker, lost ones included.
    """

    schema: int = SCHEMA
    event: str
    message: str = ""
    seconds: float = 0.0
    units: int = 0
    units_before: int = 0
    units_done: int = 0
    rows: int = 0
    rows_before: int = 0
    rows_done: int = 0
    errors: int = 0
    quarantined: int = 0
    retries: int = 0
    rows_per_s: float = 0.0
    seconds_left: float | None = None
    workers: tuple[WorkerProgress, ...] = field(default_factory=tuple)
