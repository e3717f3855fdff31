"""Open the source and destination of a run, plan its units, and compare the plan with the results.

The plan is a Parquet file that is streamed: neither planning nor resuming needs memory for all rows.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from urllib.parse import parse_qsl, quote, urlencode, urlsplit

import pyarrow as pa
import pyarrow.parquet as pq

from graphkiln_backend.graph.files import MIB
from graphkiln_backend.graph.text import redact
from graphkiln_backend.scoring.destinations.base import Destination
from graphkiln_backend.scoring.destinations.folder import FolderStore
from graphkiln_backend.scoring.destinations.object_store import ObjectStore
from graphkiln_backend.scoring.destinations.parquet import ParquetDestination
from graphkiln_backend.scoring.destinations.store import Notes, Store
from graphkiln_backend.scoring.encoders import RESERVED
from graphkiln_backend.scoring.errors import ScoringError
from graphkiln_backend.scoring.iceberg import FORM as ICEBERG_FORM
from graphkiln_backend.scoring.iceberg import PREFIX as ICEBERG
from graphkiln_backend.scoring.iceberg import Snapshot, TableName
from graphkiln_backend.scoring.messages import InputRange, ScoreRequest, Unit
from graphkiln_backend.scoring.sources.base import Columns, Source
from graphkiln_backend.scoring.sources.delta import delta_location
from graphkiln_backend.scoring.sources.files import FileSource
from graphkiln_backend.storage.address import RemoteAddress

POSTGRES_SCHEMES = ("postgresql://", "postgres://")
_FORMATS = ("parquet", "delta")
_OBJECT_SCHEMES = ("s3", "gs")
_SCHEME = re.compile(r"([a-zA-Z][\w+.-]*)://")

PLAN = "_plan.parquet"  # note in the destination
SNAPSHOT = "_snapshot.json"  # note of an unfinished run that reads an Iceberg table
_ROW_GROUP_UNITS = 1000
_ROW_GROUP_BYTES = 4 * MIB  # a unit of a folder contains a thousand file names
_REMOVE_UNITS = 1000  # between two checks of the lock
_NAMED = 3
_SCHEMA = pa.schema(
    [
        pa.field("id", pa.string()),
        pa.field("path", pa.string()),
        pa.field("part", pa.large_string()),
        pa.field("rows", pa.int64()),
        pa.field("size_bytes", pa.int64()),
    ]
)


def open_source(request: ScoreRequest) -> Source:
    """Open the source of a run.

    Raises:
        ScoringError: The source is not supported, or the options do not fit it.
    """
    if taken := [name for name in RESERVED if name in request.keep_columns]:
        raise ScoringError(f"the output has its own column '{taken[0]}'", hint="rename it in the input")
    columns = Columns(image=request.image_column, id=request.id_column, kept=request.keep_columns)
    if request.source.startswith(POSTGRES_SCHEMES):
        from graphkiln_backend.scoring.sources.postgres import TableSource

        return TableSource(request.source, request.query, columns)
    if request.query:
        raise ScoringError(f"{request.source} is not a database", hint="--query needs a postgresql:// source")
    if request.source.startswith(ICEBERG):
        from graphkiln_backend.scoring.sources.iceberg import IcebergSource

        name = TableName.parse(request.source)
        return IcebergSource(replace(name, snapshot=request.snapshot or name.snapshot), columns)
    return FileSource(request.source, columns)


def pin_snapshot(request: ScoreRequest, notes: Notes | None) -> ScoreRequest:
    """Pin the snapshot of an Iceberg source: that of an unfinished run of this source, else the newest or named one.

    Args:
        request: The run.
        notes: Notes of the destination, if it exists.

    Raises:
        ScoringError: There is no such table, or it has no snapshot.
    """
    if request.snapshot or not request.source.startswith(ICEBERG):
        return request
    content = notes.read(SNAPSHOT) if notes is not None else None
    unfinished = json.loads(content) if content else {}
    if unfinished.get("source") == request.source:
        return replace(request, snapshot=unfinished["snapshot"])
    return replace(request, snapshot=str(Snapshot(TableName.parse(request.source)).id))


def note_snapshot(request: ScoreRequest, notes: Notes) -> None:
    """Note a pinned snapshot, so that the run reads it until it is finished, whatever happens to the table."""
    if request.snapshot:
        content = json.dumps({"source": request.source, "snapshot": request.snapshot})
        notes.replace(SNAPSHOT, memoryview(content.encode()))


def open_destination(request: ScoreRequest) -> Destination:
    """Open the destination of a run, without accessing it.

    Raises:
        GraphkilnError: The destination is not supported, or the options do not fit it.
    """
    text, ledger, format_ = request.destination, request.ledger, request.format
    if format_ and format_ not in _FORMATS:
        named = f"; an Iceberg table is named by --out {ICEBERG}CATALOG/NAMESPACE.TABLE" if format_ == "iceberg" else ""
        raise ScoringError(f"unknown --format {format_}", hint=f"use one of {', '.join(_FORMATS)}{named}")
    scheme = found[1] if (found := _SCHEME.match(text)) else ""
    if ledger and (format_ == "delta" or scheme not in _OBJECT_SCHEMES):
        raise ScoringError(f"{redact(text)} needs no ledger: its commits are exclusive", hint="leave out --ledger")
    if text.startswith(ICEBERG):
        if format_:
            raise ScoringError(f"--format {format_} does not apply to Iceberg", hint="leave out --format")
        from graphkiln_backend.scoring.destinations.iceberg import IcebergDestination

        return IcebergDestination(TableName.parse(text))
    if text.startswith(POSTGRES_SCHEMES):
        if format_:
            raise ScoringError(f"--format {format_} does not apply to PostgreSQL", hint="leave out --format")
        return _open_table(text)
    if scheme and scheme not in _OBJECT_SCHEMES:
        tables = f"postgresql://USER@HOST/DATABASE?table=NAME or {ICEBERG_FORM}"
        forms = f"a folder, s3://BUCKET/PATH, gs://BUCKET/PATH, {tables}"
        raise ScoringError(f"'{redact(text)}' is not supported as a destination", hint=f"use {forms}")
    address = RemoteAddress.parse(text)
    if ledger and address:
        from graphkiln_backend.scoring.destinations.database import Database
        from graphkiln_backend.scoring.destinations.ledger import LedgeredDestination

        return LedgeredDestination(ObjectStore(address, exclusive=False), Database(ledger))
    store: Store = ObjectStore(address) if address else FolderStore(Path(text))
    if format_ == "delta":
        from graphkiln_backend.scoring.destinations.delta import DeltaDestination

        return DeltaDestination(store, *delta_location(text))
    return ParquetDestination(store)


def _open_table(text: str) -> Destination:
    from graphkiln_backend.scoring.destinations.database import Database
    from graphkiln_backend.scoring.destinations.table import TableDestination

    options = dict(parse_qsl(urlsplit(text).query))
    table = options.pop("table", "")
    address = text.partition("?")[0]  # not by urlunsplit, which drops the slashes of an address without a host
    if options:  # libpq does not decode a plus as a space
        address += f"?{urlencode(options, quote_via=quote)}"
    return TableDestination(Database(address), table)


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanTotals:
    """Size of a plan. Bytes of listed images are not counted, because they are not looked up."""

    units: int = 0
    rows: int = 0
    size_bytes: int = 0


def write_plan(path: Path, ranges: Iterable[InputRange], configuration: str) -> PlanTotals:
    """Write the units of a source under a configuration digest."""
    units = rows = size_bytes = 0
    with pq.ParquetWriter(path, _SCHEMA, compression="zstd") as writer:
        for group in _row_groups(one.unit(configuration) for one in ranges):
            columns = {name: [getattr(unit, name) for unit in group] for name in _SCHEMA.names}
            writer.write_batch(pa.RecordBatch.from_pydict(columns, _SCHEMA))
            units += len(group)
            rows += sum(unit.rows for unit in group)
            size_bytes += sum(unit.size_bytes for unit in group)
    return PlanTotals(units=units, rows=rows, size_bytes=size_bytes)


def _row_groups(units: Iterable[Unit]) -> Iterator[list[Unit]]:
    group: list[Unit] = []
    size = 0
    for unit in units:
        group.append(unit)
        size += len(unit.part)
        if len(group) == _ROW_GROUP_UNITS or size > _ROW_GROUP_BYTES:
            yield group
            group, size = [], 0
    if group:
        yield group


def read_plan(path: Path) -> Iterator[Unit]:
    """Stream the units of a plan in order."""
    with pq.ParquetFile(path) as file:
        for index in range(file.num_row_groups):
            for row in file.read_row_group(index).to_pylist():
                yield Unit(**row)


@dataclass(frozen=True, kw_only=True, slots=True)
class ResumeState:
    """Results in a destination, compared with a plan.

    Attributes:
        committed: Ids of all units with a result.
        done_units: Number of planned units with a result.
        done_rows: Rows of those units.
        stale: Ids of units with a result that are not planned.
    """

    committed: frozenset[str]
    done_units: int
    done_rows: int
    stale: frozenset[str]


def read_resume_state(committed_ids: Iterable[str], plan: Path) -> ResumeState:
    """Compare the units that have a result with a plan, reading both once."""
    committed = frozenset(committed_ids)
    stale, units, rows = set(committed), 0, 0
    for unit in read_plan(plan):
        if unit.id in committed:
            units, rows = units + 1, rows + unit.rows
            stale.discard(unit.id)
    return ResumeState(committed=committed, done_units=units, done_rows=rows, stale=frozenset(stale))


def remove_stale(
    destination: Destination,
    stale: frozenset[str],
    configuration: str,
    *,
    replace: bool,
    check: Callable[[], None] = lambda: None,
) -> None:
    """Remove results that are not planned, or refuse to run.

    Args:
        destination: The destination.
        stale: Ids of these results.
        configuration: Configuration digest of this run.
        replace: True if results whose input has changed may be removed.
        check: Raises if the lock is lost; called before each batch is removed.

    Raises:
        ScoringError: They are of another model or other settings, or `replace` is not set.
    """
    if not stale:
        return
    others = {each.configuration for each in destination.describe(stale) if not each.damage} - {configuration}
    if others:
        raise ScoringError(
            "the destination holds results of another model, another version or other settings",
            hint="use another destination for this run: results of two models are never mixed",
        )
    if not replace:
        raise ScoringError(
            f"the destination holds {len(stale)} units that are not part of this input: files were changed or removed, "
            "or --rows-per-unit was different",
            hint="--replace removes them and scores what took their place",
        )
    remaining = sorted(stale)
    for begin in range(0, len(remaining), _REMOVE_UNITS):
        check()
        destination.remove(remaining[begin : begin + _REMOVE_UNITS])


def check_complete(destination: Destination, plan: Path, reasons: Mapping[str, str]) -> None:
    """Check that the destination, listed again, has a result of every planned unit and no other results.

    Only the ids of units are compared: a worker commits a unit in one step with all of its rows. `verify.verify` checks
    the contents, too.

    Args:
        destination: The destination.
        plan: Path of the plan.
        reasons: Reasons of units without a result, by id, as far as known.

    Raises:
        ScoringError: Results are missing, or there are others.
    """
    committed = set(destination.committed_ids())
    missing: list[Unit] = []
    count = rows = 0
    for unit in read_plan(plan):
        if unit.id in committed:
            committed.discard(unit.id)
            continue
        count, rows = count + 1, rows + unit.rows
        if len(missing) < _NAMED:
            missing.append(unit)
    if count:
        named = "; ".join(
            f"unit {each.id} of {each.path}: {reasons.get(each.id, 'its result is gone')}" for each in missing
        )
        raise ScoringError(
            f"{count} units ({rows} rows) have no result: {named}",
            hint="all others are committed; run the same command to try these again",
        )
    if committed:
        raise ScoringError(
            f"{len(committed)} units have a result but are not planned",
            hint="check that no other run writes to this destination",
        )
