"""A run from Python or from the command line: check the request, run it, write its notes.

A run leaves two notes beside its results. `_run.json` records the request, the versions, the workers and the figures of
the newest run, and one line for each earlier run. `_errors.parquet` collects the rows with an error.
"""

from __future__ import annotations

import json
import logging
import platform
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Unpack

import pyarrow as pa
import pyarrow.parquet as pq

from graphkiln.scoring.metrics import RunMetrics
from graphkiln.scoring.options import (
    ScoreOptions,
    absolute,
    build_request,
    check_places,
    check_source,
    with_pinned_snapshot,
)
from graphkiln.scoring.run_state import Progress, QuarantinedRow, RunState, WorkerRecord
from graphkiln_backend.graph.decoding import encode
from graphkiln_backend.graph.errors import GraphkilnError
from graphkiln_backend.graph.modules import installed_version
from graphkiln_backend.graph.text import redact
from graphkiln_backend.scoring import driver
from graphkiln_backend.scoring.destinations.base import Destination
from graphkiln_backend.scoring.destinations.lock import Lock
from graphkiln_backend.scoring.errors import RunInterrupted, ScoringError
from graphkiln_backend.scoring.messages import Event, ScoreRequest, StageTimes
from graphkiln_backend.scoring.model import with_version
from graphkiln_backend.scoring.plan import PLAN, open_destination, read_plan
from graphkiln_backend.scoring.scratch import Scratch, scratch_folder
from graphkiln_backend.scoring.verify import Verification
from graphkiln_backend.scoring.verify import verify as verify_results

SCHEMA = 1
NOTE, ERRORS = "_run.json", "_errors.parquet"
_PACKAGES = ("graphkiln", "ray", "pyarrow", "pyiceberg", "numpy", "pillow", "onnxruntime", "openvino")
_MAX_EARLIER = 1000
_ERRORS_SCHEMA = pa.schema([("id", pa.string()), ("unit", pa.string()), ("reason", pa.string())])
_log = logging.getLogger("graphkiln.scoring")

Observer = Callable[[Progress], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Figures:
    """Figures of a run.

    Attributes:
        units: Units of the input.
        rows: Rows of the input.
        units_before: Units committed by earlier runs.
        rows_before: Rows of those units.
        units_done: Units committed by this run.
        scored: Rows answered by this run.
        errors: Rows of this run with an error.
        quarantined: Rows of those that ended a worker.
        retries: Failed attempts.
        twins: Units committed by an attempt whose worker ended before it could report it.
        computing_s: Seconds since the first worker was ready.
        rows_per_s: Rate during `computing_s`.
        times: Seconds per stage, summed over workers.
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
class RunRecord:
    """The document `_run.json`.

    Attributes:
        schema: Version of the format; increased when a key is removed or changes its meaning.
        outcome: `finished` (every row is accounted for), `interrupted` or `failed`.
        reason: Why it failed; empty otherwise.
        begun: ISO 8601, in UTC.
        ended: ISO 8601, in UTC.
        request: The request without credentials.
        configuration: Digest of everything that changes an answer.
        versions: Versions of Python, the system and packages on the driver.
        quarantined: Rows that ended a worker; the first thousand.
        problems: Messages about failures during the run; the first thousand.
        earlier: Earlier runs on this destination, newest first: `begun`, `ended`, `outcome` and some figures.
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


def score(
    source: str | Path,
    *,
    model: str | Path,
    out: str | Path,
    observe: Observer | None = None,
    **options: Unpack[ScoreOptions],
) -> RunRecord:
    """Score a data set: every row of the source gets one answer or error in the destination.

    The same call resumes an interrupted run.

    Args:
        source: Folder or pattern of images, listing, Parquet, tars or database; local or in a remote store.
        model: `STORE/NAME`, `STORE/NAME:VERSION` or `STORE/NAME/VERSION`; local or in a remote store.
        out: Folder, remote store or database for the answers.
        observe: Called with the progress after each event.
        options: See `ScoreOptions`.

    Returns:
        The record that is written to `_run.json`.

    Raises:
        GraphkilnError: The request is invalid, or the run cannot be finished; the same call resumes it.
    """
    return run_request(build_request(source, model, out, options), observe)


def verify(out: str | Path, *, format: str = "", ledger: str = "") -> Verification:  # noqa: A002 - the flag's name
    """Compare the results in a destination with the plan of its last run.

    Args:
        out: The destination.
        format: `parquet` or `delta`; empty for the default of the destination.
        ledger: The Postgres database that records commits, if the run used one.

    Raises:
        ScoringError: The destination does not exist, has no plan, or cannot be read.
    """
    place = absolute(str(out))
    destination = open_destination(
        ScoreRequest(source="", model="", destination=place, format=format, ledger=ledger),
    )
    with scratch_folder(Scratch.PLAN) as folder:
        plan = folder.path / PLAN
        if not destination.notes.fetch(PLAN, plan):
            raise ScoringError(f"{out} has no plan of graphkiln score", hint="name the --out of a run")
        return verify_results(destination, read_plan(plan), spill=folder.path)


def run_request(request: ScoreRequest, observe: Observer | None = None) -> RunRecord:
    """Run a request, as `score` does."""
    check_places(request)
    request = with_pinned_snapshot(request)
    check_source(request)
    request = with_version(request)
    state, metrics, begun = RunState(), RunMetrics(), datetime.now(UTC)
    record: RunRecord | None = None

    def report(event: Event) -> None:
        metrics.observe(event)
        progress = state.observe(event)
        if observe:
            observe(progress)

    def write_notes(destination: Destination, lock: Lock, error: BaseException | None) -> None:
        nonlocal record
        failure = error or _update_errors(state, destination, lock)
        record = describe_run(request, state, begun, failure)
        if state.plan is not None:
            try:
                lock.check()
                write_record(record, destination)
            except (GraphkilnError, OSError) as unwritten:
                if failure is None:
                    raise
                failure.add_note(f"{NOTE} could not be written either: {unwritten}")
        if failure is not None and failure is not error:
            raise failure

    driver.score_data_set(request, report, write_notes)
    assert record is not None  # noqa: S101 - a run that ends without an error has written its notes
    return record


def _update_errors(state: RunState, destination: Destination, lock: Lock) -> BaseException | None:
    """Write `_errors.parquet` if this run committed anything or the file is missing; return the error if that fails."""
    try:
        if state.units or destination.notes.read(ERRORS) is None:
            collect_errors(destination, destination.committed_ids(), lock.check)
    except BaseException as failure:  # noqa: BLE001 - raised after it is recorded
        return failure
    return None


def describe_run(
    request: ScoreRequest, state: RunState, begun: datetime, error: BaseException | None = None
) -> RunRecord:
    """Return the record of a run that ends now.

    Args:
        request: The run.
        state: Its events.
        begun: Start time.
        error: The error that ends it, or None.
    """
    interrupted = isinstance(error, KeyboardInterrupt | RunInterrupted)
    outcome = "finished" if error is None else "interrupted" if interrupted else "failed"
    plan = state.plan
    return RunRecord(
        outcome=outcome,
        reason=redact(str(error)) if outcome == "failed" else "",
        begun=begun.isoformat(timespec="seconds"),
        ended=datetime.now(UTC).isoformat(timespec="seconds"),
        request=_describe_request(request),
        configuration=plan.configuration if plan else "",
        versions={
            "python": platform.python_version(),
            "system": f"{platform.system()} {platform.release()}",
            **{name: version for name in _PACKAGES if (version := installed_version(name))},
        },
        figures=Figures(
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
        ),
        workers=tuple(replace(worker) for worker in state.workers.values()),
        quarantined=tuple(state.quarantined),
        problems=tuple(state.problems),
    )


def _describe_request(request: ScoreRequest) -> dict[str, Any]:
    """Convert a request to plain data without credentials."""
    converted = {
        "model": str(request.model),
        "cache": str(request.cache) if request.cache else None,
        "settings": {each.key: each.value for each in reversed(request.overrides)},
    }
    names = [field.name for field in fields(request) if field.name not in {"overrides", "backends"}]
    plain = {**{name: getattr(request, name) for name in names}, **converted}
    return {name: redact(value) if isinstance(value, str) else value for name, value in plain.items()}


def write_record(record: RunRecord, destination: Destination) -> None:
    """Write `_run.json`, with lines for the earlier runs that it lists now.

    Raises:
        ScoringError: The destination cannot be read or written.
    """
    document = encode(record) | {"earlier": _earlier_runs(destination.notes.read(NOTE))}
    content = json.dumps(document, indent=2, ensure_ascii=False) + "\n"
    destination.notes.replace(NOTE, memoryview(content.encode()))


def _earlier_runs(content: bytes | None) -> list[Any]:
    if content is None:
        return []
    try:
        last = json.loads(content)
        figures = {name: last["figures"][name] for name in ("units_done", "scored", "errors", "rows_per_s")}
        line = {**{name: last[name] for name in ("begun", "ended", "outcome", "configuration")}, **figures}
        return [line, *last["earlier"]][:_MAX_EARLIER]
    except (ValueError, KeyError, TypeError):  # not worth failing a finished run
        _log.warning("%s was damaged: its list of earlier runs is lost", NOTE)
        return []


def collect_errors(destination: Destination, unit_ids: Iterable[str], check: Callable[[], None] = lambda: None) -> int:
    """Write `_errors.parquet` (id, unit, reason) from the results of units, holding one unit in memory.

    Args:
        destination: The destination.
        unit_ids: Units with a result.
        check: Called for each unit; raises if the lock is lost.

    Returns:
        The number of rows with an error.

    Raises:
        ScoringError: A result is damaged or cannot be read, or the note cannot be written.
    """
    count = 0
    with scratch_folder(Scratch.ERRORS) as folder:
        path = folder.path / ERRORS
        with pq.ParquetWriter(path, _ERRORS_SCHEMA, compression="zstd") as writer:
            for one in destination.describe(unit_ids):
                check()
                if one.damage:
                    hint = (
                        "graphkiln score --verify lists all damaged results: remove them and run the same command again"
                    )
                    raise ScoringError(
                        f"the result of unit {one.unit_id}, {one.place}, is damaged: {one.damage}", hint=hint
                    )
                if one.errors:
                    rows = destination.read(one.unit_id, ["id", "error"])
                    wrong = rows.filter(rows.column("error").is_valid())
                    ids, units = wrong.column("id").cast(pa.string()), pa.repeat(one.unit_id, len(wrong))
                    writer.write_table(pa.table([ids, units, wrong.column("error")], schema=_ERRORS_SCHEMA))
                    count += len(wrong)
        destination.notes.replace(ERRORS, path)
    return count
