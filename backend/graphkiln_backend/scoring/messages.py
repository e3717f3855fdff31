"""Data that driver, workers and sources exchange: the request, units of work, attempts, outcomes and events.

The driver cuts the input into units and gives a worker an `Attempt` at one; the worker answers with an `Outcome`. What
follows from it is reported as an `Event` to the terminal, to metrics and to `_run.json`: in order, from one thread.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from enum import StrEnum
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from graphkiln_backend.lowering.settings import Override

DEFAULT_ROWS_PER_UNIT = 1000
DEFAULT_TOP_K = 5
ID_DIGITS = 32
Content = bytes | npt.NDArray[np.uint8]  # an encoded image, or its pixels: [height, width] or [height, width, 3 or 4]


@dataclass(frozen=True, kw_only=True, slots=True)
class ScoreRequest:
    """Source, model, destination and options of a run. It is sent to each worker.

    The other attributes are the options of the same names in `graphkiln.scoring`, see `ScoreOptions` there.

    Attributes:
        source: Absolute path or address, see `plan.open_source`.
        snapshot: Id of the snapshot of an Iceberg table, which all workers read; empty until it is pinned.
        model: Absolute path of the model's folder, or an address in a remote store, `s3://BUCKET/STORE/NAME`.
        version: Version number, or None for the newest version.
        destination: Absolute path or address, see `plan.open_destination`.
        overrides: Settings that override the model's configuration; earlier ones win.
        backends: Names of Triton backends that are installed from this package.
    """

    source: str
    snapshot: str = ""
    model: Path | str
    version: int | None = None
    destination: str
    overrides: tuple[Override, ...] = ()
    backends: frozenset[str] = frozenset()
    top_k: int = DEFAULT_TOP_K
    scores: bool = False
    outputs: tuple[str, ...] = ()
    softmax: bool = False
    keep_columns: tuple[str, ...] = ()
    image_column: str = ""
    id_column: str = ""
    query: str = ""
    rows_per_unit: int = DEFAULT_ROWS_PER_UNIT
    workers: int = 0
    cores_per_worker: int = 0
    address: str = ""
    cache: Path | None = None
    format: str = ""
    ledger: str = ""
    replace: bool = False

    def facts(self) -> Mapping[str, str]:
        """Return the options that change an answer or its columns, as part of the configuration digest."""
        answers = f"outputs {self.outputs}" if self.outputs else "scores" if self.scores else f"top {self.top_k}"
        return {
            "settings": repr([(each.key, each.value) for each in self.overrides]),
            "answers": f"{answers}, softmax" if self.softmax else answers,
            "columns": repr((self.image_column, self.id_column, self.keep_columns)),
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class Unit:
    """A range of the input that is read, computed and committed as a whole.

    Attributes:
        id: Digest of the input range and the configuration, in hexadecimal.
        path: File, object or table that contains the range.
        part: The range within `path`, in a format private to its source.
        rows: Number of rows.
        size_bytes: Bytes to read, or 0 if unknown.
    """

    id: str
    path: str
    part: str
    rows: int
    size_bytes: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class InputRange:
    """A range of the input as listed by a source; a configuration makes it a `Unit` with the same attributes.

    Attributes:
        part: Not part of the unit's id: a range that only moved within its file keeps its answers.
        identity: Text that changes with the content and differs between ranges: names, sizes, modification times,
            ETags or digests.
    """

    path: str
    part: str
    identity: str
    rows: int
    size_bytes: int = 0

    def unit(self, configuration: str) -> Unit:
        """Return the unit of this range.

        Args:
            configuration: Digest of everything else that changes an answer.
        """
        text = "\0".join((configuration, self.path, self.identity, str(self.rows)))
        digest = hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()
        return Unit(id=digest[:ID_DIGITS], path=self.path, part=self.part, rows=self.rows, size_bytes=self.size_bytes)


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One image of the input.

    Attributes:
        id: Unique id of the row in the output.
        load: Read the encoded image, or uint8 pixels; called from a reader thread. `InputChanged` and
            `SourceUnavailable` fail the whole unit; any other `GraphkilnError` or `OSError` becomes the error of this
            row.
        kept: Input columns to copy to the output, each as an array of one element, which keeps the type of a null.
    """

    id: str
    load: Callable[[], Content]
    kept: Mapping[str, pa.Array] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class Span:
    """Positions of rows in a unit, `stop` excluded."""

    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, kw_only=True, slots=True)
class Attempt:
    """A unit that a worker has to score.

    Attributes:
        number: Unique in the run; the outcome of the attempt carries it.
        quarantined: Rows to skip, by position, with the reason that becomes their error.
        probe: Rows to compute without a commit, to find out if the worker survives them; None to score the unit.
        outages_are_errors: Turn a few rows that cannot be read into error rows, instead of failing the attempt.
    """

    number: int
    unit: Unit
    quarantined: Mapping[int, str] = field(default_factory=dict)
    probe: Span | None = None
    outages_are_errors: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class StageTimes:
    """Seconds spent in each stage. Stages overlap, so the sum is not an elapsed time.

    Attributes:
        read_s: Elapsed time of reading rows, summed over reader threads.
        decode_s: CPU time of decoding and preprocessing.
        wait_s: Elapsed time in which a batch waited for its rows.
        compute_s: Elapsed time in the session.
        encode_s: CPU time of converting outputs to columns.
        commit_s: Elapsed time in the destination.
    """

    read_s: float = 0.0
    decode_s: float = 0.0
    wait_s: float = 0.0
    compute_s: float = 0.0
    encode_s: float = 0.0
    commit_s: float = 0.0

    def __add__(self, other: StageTimes) -> StageTimes:
        """Add stage by stage."""
        names = [each.name for each in fields(self)]
        return StageTimes(**{name: getattr(self, name) + getattr(other, name) for name in names})


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerFacts:
    """Description of a worker for `_run.json`.

    Attributes:
        node: Host name.
        session: Engine, device and precision.
        self_test: Report of the golden samples as JSON; empty if the model has none.
        seconds: Start-up time.
        version: Version of graphkiln on the node.
        configuration: Digest of the model and of everything that changes an answer, as found on the node.
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
    """Figures of a committed unit.

    Attributes:
        errors: Number of rows with an error.
        seconds: From the start of reading to the end of the commit.
        twin: True if the destination already had a result, written by an attempt that could not report it.
        quarantined: Reasons by row id.
        example: The first error, shortened; empty if there is none.
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
    """Cause of a failed attempt."""

    CHANGED = "changed"  # the input differs from the plan
    UNREADABLE = "unreadable"  # the unit cannot be read at all
    SOURCE = "source"  # temporary failure of the source
    STORE = "store"  # temporary failure of the destination
    REFUSED = "refused"  # the destination does not accept such a result
    ROWS = "rows"  # computing the rows failed, and the session is sound
    COMMIT = "commit"  # the worker ended during the commit; assigned by the driver


class Blame(StrEnum):
    """Cause of a worker's end, which ends all of its attempts."""

    ROWS = "rows"  # the process crashed or hung on a living node: a row may be the reason
    WORKER = "worker"  # it computes wrong answers or cannot start
    NODE = "node"  # the node is gone


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerReady:
    """A worker has proven its session and accepts attempts; also reported as an event."""

    worker: str
    facts: WorkerFacts


@dataclass(frozen=True, kw_only=True, slots=True)
class Computed:
    """All rows are computed; the fleet makes the worker commit them next."""

    worker: str
    attempt: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Survived:
    """The worker computed the rows of a probe."""

    worker: str
    attempt: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Done:
    """The unit is committed."""

    worker: str
    attempt: int
    report: UnitReport


@dataclass(frozen=True, kw_only=True, slots=True)
class Failed:
    """The attempt failed; the worker continues."""

    worker: str
    attempt: int
    cause: Cause
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Ended:
    """The worker is gone, with all of its attempts.

    Attributes:
        reason: Predicate of the worker, such as `hung for 60 s`.
        committing: Numbers of the attempts that were being committed: all of their rows were computed.
    """

    worker: str
    blame: Blame
    reason: str
    committing: frozenset[int] = frozenset()


Outcome = WorkerReady | Survived | Done | Failed | Ended


@dataclass(frozen=True, kw_only=True, slots=True)
class RunPlanned:
    """The plan is written; workers start next if anything is left.

    Attributes:
        configuration: Digest of the model and of everything that changes an answer.
        units: Units of the whole input.
        rows: Rows of the whole input.
        size_bytes: Bytes of the whole input, as far as known.
        done_units: Units that already had a result.
        done_rows: Rows of those units.
        removed_units: Results removed by `--replace`.
    """

    configuration: str
    units: int
    rows: int
    size_bytes: int
    done_units: int
    done_rows: int
    removed_units: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeJoined:
    """A node takes part, with room for this many workers."""

    node: str
    workers: int


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeLost:
    """A node left the cluster; its units are computed elsewhere."""

    node: str


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeRefused:
    """A node is not used: it is unsuitable, or its workers failed too often."""

    node: str
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerEnded:
    """A worker ended or could not start; it is replaced.

    Attributes:
        unfit: True if it could not start, or its self-test or a replay of the golden samples failed.
    """

    worker: str
    node: str
    reason: str
    unfit: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class UnitCommitted:
    """A unit has its result; reported once for each unit."""

    worker: str
    report: UnitReport


@dataclass(frozen=True, kw_only=True, slots=True)
class UnitRetried:
    """An attempt failed; the unit is tried again."""

    unit_id: str
    path: str
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class RowQuarantined:
    """A row that ends its worker was found; it becomes an error, the rest of the unit is scored."""

    unit_id: str
    path: str
    position: int
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class UnitFailed:
    """A unit stays without a result; the run continues with the others and ends with an error."""

    unit_id: str
    path: str
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class RunFinished:
    """The destination has a result of each unit of the plan."""


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
