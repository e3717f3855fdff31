"""What travels between the driver and its workers: attempts to score a unit, and what became of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from graphkiln_backend.scoring.scorer import StageTimes
from graphkiln_backend.scoring.units import Unit


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
        changes_are_errors: Whether a row that changed since it was planned is an error row; otherwise the unit is
            planned anew.
        outages_are_errors: Whether a row that cannot be read just now is an error row, if all but few of the unit can
            be; otherwise the unit is tried again later.
        patience_s: Seconds without any progress after which the worker hangs.
    """

    unit: Unit
    quarantined: Mapping[int, str] = field(default_factory=dict)
    probe: Span | None = None
    changes_are_errors: bool = False
    outages_are_errors: bool = False
    patience_s: float = 60.0
