"""Notes that a run leaves beside its results: `_run.json` and `_errors.parquet`.

`_run.json` says what a run was asked, what it was computed by, and what came of it: the newest run in full, those
before it in a line each. `_errors.parquet` collects the rows with an error: what a person looks at first.
"""

from __future__ import annotations

import json
import logging
import platform
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from graphkiln.scoring.run_state import QuarantinedRow, RunState, WorkerTally
from graphkiln_backend.graph.decoding import encode
from graphkiln_backend.graph.modules import installed_version
from graphkiln_backend.graph.text import redact
from graphkiln_backend.scoring.destinations.base import Destination
from graphkiln_backend.scoring.errors import RunInterrupted
from graphkiln_backend.scoring.messages import StageTimes
from graphkiln_backend.scoring.request import ScoreRequest
from graphkiln_backend.scoring.scratch import Scratch, scratch_folder

_log = logging.getLogger("graphkiln.scoring")

SCHEMA = 1
NOTE, ERRORS = "_run.json", "_errors.parquet"
_PACKAGES = ("graphkiln", "ray", "pyarrow", "numpy", "pillow", "onnxruntime", "openvino")
_MOST_EARLIER = 1000
_ERRORS_SCHEMA = pa.schema([("id", pa.string()), ("unit", pa.string()), ("reason", pa.string())])


@dataclass(frozen=True, kw_only=True, slots=True)
class Figures:
    """A run in numbers.

    Attributes:
        units: Units of the input.
        rows: Rows of the input.
        units_before: Units committed by earlier runs.
        rows_before: Rows answered by earlier runs.
        units_done: Committed by this run.
        scored: Rows that this run answered.
        errors: Rows that this run gave an error.
        quarantined: Rows with an error that ended a worker.
        retries: Attempts that came to nothing.
        twins: Units that an earlier attempt had committed, whose worker did not live to report it.
        seconds: From the start to the end.
        computing_s: Seconds since the first worker was ready.
        rows_per_s: In these.
        times: What the stages took, in seconds summed over workers; they overlap.
    """

    units: int
    rows: int
    units_before: int
    rows_before: int
    units_done: int
    scored: int
    errors: int
    quarantined: int
    retries: int
    twins: int
    seconds: float
    computing_s: float
    rows_per_s: float
    times: StageTimes


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerRecord:
    """A worker and what it computed.

    Attributes:
        name: In this run.
        node: Name of its machine.
        session: Engine, device and precision.
        self_test: What the golden samples proved; None without any.
        version: Version of graphkiln there.
        start_s: How long it took to be ready.
        units: Committed by it.
        rows: In these.
        errors: Rows of these with an error.
        rows_per_s: From when it was ready to its last commit.
        times: What the stages of its units took.
        ended: Why it was replaced; empty where it was not.
    """

    name: str
    node: str
    pid: int
    session: str
    self_test: Any
    version: str
    start_s: float
    units: int
    rows: int
    errors: int
    rows_per_s: float
    times: StageTimes
    ended: str


@dataclass(frozen=True, kw_only=True, slots=True)
class RunRecord:
    """A run.

    Attributes:
        schema: Schema of this document; it changes when a key goes or means something else.
        outcome: `finished`: each row is accounted for; `interrupted`; or `failed`.
        reason: Why it failed; empty otherwise.
        begun: When, as ISO 8601 in UTC.
        ended: When.
        request: As it was understood, without credentials.
        configuration: Digest of all that changes an answer; results of two are never mixed.
        versions: Versions of the driver's Python, system and packages.
        workers: Who computed what.
        quarantined: Rows that ended a worker; the first thousand.
        problems: What happened on the way; the first thousand.
        earlier: The runs before it on this destination, newest first: `begun`, `ended`, `outcome` and some figures.
    """

    schema: int = SCHEMA
    outcome: str
    reason: str = ""
    begun: str
    ended: str
    request: Mapping[str, Any]
    configuration: str
    versions: Mapping[str, str]
    figures: Figures
    workers: tuple[WorkerRecord, ...]
    quarantined: tuple[QuarantinedRow, ...] = ()
    problems: tuple[str, ...] = ()
    earlier: tuple[Mapping[str, Any], ...] = ()


def describe_run(
    request: ScoreRequest, state: RunState, begun: datetime, error: BaseException | None = None
) -> RunRecord:
    """The record of a run that ends now.

    Args:
        request: The run.
        state: What happened.
        begun: When it was.
        error: What ends it; None where every row is accounted for.
    """
    interrupted = isinstance(error, KeyboardInterrupt | RunInterrupted)
    outcome = "finished" if error is None else "interrupted" if interrupted else "failed"
    return RunRecord(
        outcome=outcome,
        reason=redact(str(error)) if outcome == "failed" else "",
        begun=begun.isoformat(timespec="seconds"),
        ended=datetime.now(UTC).isoformat(timespec="seconds"),
        request=_describe_request(request),
        configuration=state.plan.configuration if state.plan else "",
        versions={
            "python": platform.python_version(),
            "system": f"{platform.system()} {platform.release()}",
            **{name: version for name in _PACKAGES if (version := installed_version(name))},
        },
        figures=_figures(state),
        workers=tuple(_worker_record(name, tally) for name, tally in state.workers.items()),
        quarantined=tuple(state.quarantined),
        problems=tuple(state.problems),
    )


def _describe_request(request: ScoreRequest) -> dict[str, Any]:
    """A request as plain data, without credentials."""
    redacted = ("source", "model", "destination", "ledger", "address")
    plain = (
        *("version", "top_k", "scores", "softmax", "outputs", "keep_columns", "image_column", "id_column", "query"),
        *("rows_per_unit", "workers", "cores_per_worker", "format", "replace"),
    )
    return {
        **{name: redact(str(getattr(request, name))) for name in redacted},
        **{name: getattr(request, name) for name in plain},
        "settings": {each.key: each.value for each in reversed(request.overrides)},
        "cache": str(request.cache) if request.cache else None,
    }


def _figures(state: RunState) -> Figures:
    plan = state.plan
    return Figures(
        units=plan.units if plan else 0,
        rows=plan.rows if plan else 0,
        units_before=plan.done_units if plan else 0,
        rows_before=plan.done_rows if plan else 0,
        units_done=state.units,
        scored=state.rows - state.errors,
        errors=state.errors,
        quarantined=state.quarantined_rows,
        retries=state.retries,
        twins=state.twins,
        seconds=round(state.seconds, 3),
        computing_s=round(state.computing_s, 3),
        rows_per_s=round(state.rows_per_s, 1),
        times=sum((worker.times for worker in state.workers.values()), StageTimes()),
    )


def _worker_record(name: str, tally: WorkerTally) -> WorkerRecord:
    facts = tally.facts
    return WorkerRecord(
        name=name,
        node=tally.node,
        pid=facts.pid if facts else 0,
        session=facts.session if facts else "",
        self_test=json.loads(facts.self_test) if facts and facts.self_test else None,
        version=facts.version if facts else "",
        start_s=round(facts.seconds, 3) if facts else 0.0,
        units=tally.units,
        rows=tally.rows,
        errors=tally.errors,
        rows_per_s=round(tally.rows_per_s, 1),
        times=tally.times,
        ended=tally.ended,
    )


def write_record(record: RunRecord, destination: Destination) -> None:
    """Put a record into its destination, with what is known there of the runs before it.

    Raises:
        ScoringError: The store cannot be read or written.
    """
    document = encode(record) | {"earlier": _earlier(destination.notes.read(NOTE))}
    content = json.dumps(document, indent=2, ensure_ascii=False) + "\n"
    destination.notes.replace(NOTE, memoryview(content.encode()))


def _earlier(content: bytes | None) -> list[Any]:
    """The line of the run that is replaced, before those that it had."""
    if content is None:
        return []
    try:
        last = json.loads(content)
        figures = {name: last["figures"][name] for name in ("units_done", "scored", "errors", "rows_per_s")}
        line = {**{name: last[name] for name in ("begun", "ended", "outcome", "configuration")}, **figures}
        return [line, *last["earlier"]][:_MOST_EARLIER]
    except (ValueError, KeyError, TypeError):  # foreign content: the end of a run is no time to fail for that
        _log.warning("%s was damaged: it says nothing of earlier runs any more", NOTE)
        return []


def collect_errors(destination: Destination, unit_ids: Iterable[str], check: Callable[[], None] = lambda: None) -> int:
    """Write the note `_errors.parquet` (id, unit, reason); it is derived from the results, and written anew each time.

    Args:
        destination: Where the results are.
        unit_ids: Units that have a result; memory holds the rows of one.
        check: Called for each; raises where the lock is lost.

    Returns:
        How many rows it has.

    Raises:
        ScoringError: A result cannot be read, or the note cannot be written.
    """
    count = 0
    with scratch_folder(Scratch.ERRORS) as folder:
        path = folder.path / ERRORS
        with pq.ParquetWriter(path, _ERRORS_SCHEMA, compression="zstd") as writer:
            for one in destination.describe(unit_ids):
                check()
                if one.errors:
                    rows = destination.read(one.unit_id, ["id", "error"])
                    wrong = rows.filter(rows.column("error").is_valid())
                    ids, units = wrong.column("id").cast(pa.string()), pa.repeat(one.unit_id, len(wrong))
                    writer.write_table(pa.table([ids, units, wrong.column("error")], schema=_ERRORS_SCHEMA))
                    count += len(wrong)
        destination.notes.replace(ERRORS, path)
    return count
