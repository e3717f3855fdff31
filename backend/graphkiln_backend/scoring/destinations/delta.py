"""Delta Lake tables: a unit is a Parquet file and a transaction in the table's log.

Each unit is a separate application in the log (`appId`), so that the log refuses the second of two attempts, even if
they commit simultaneously; conflicts with other units are retried. A commit is one small log file, and deltalake writes
a checkpoint every hundred commits: larger units need fewer.
Source: "Transaction Identifiers" and "Conflict detection" of the Delta transaction protocol.
"""

from __future__ import annotations

import json
import threading
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pyarrow as pa

from graphkiln_backend.scoring.column_types import convert_schema
from graphkiln_backend.scoring.destinations.base import Committed, Result
from graphkiln_backend.scoring.destinations.parquet import DELTA_FILE, RESULT, ParquetDestination, encode_result
from graphkiln_backend.scoring.destinations.store import Store
from graphkiln_backend.scoring.errors import CommitConflict, ScoringError, StoreError

# Conversion of Arrow's types to Delta's: files and schema must agree, or other readers fail or read wrong values.
#
# Delta has no unsigned integers, half floats or nanoseconds: wider types are written; times have microseconds. Source:
# "Schema Serialization Format" of the Delta transaction protocol.

_TYPES = {
    pa.null(): pa.string(),
    pa.uint8(): pa.int16(),
    pa.uint16(): pa.int32(),
    pa.uint32(): pa.int64(),
    pa.uint64(): pa.decimal128(20),
    pa.float16(): pa.float32(),
    pa.large_string(): pa.string(),
    pa.string_view(): pa.string(),
    pa.large_binary(): pa.binary(),
    pa.binary_view(): pa.binary(),
    pa.date64(): pa.date32(),
}


def as_delta(table: pa.Table) -> pa.Table:
    """Convert the columns of a table to types of Delta."""
    return table.cast(delta_schema(table.schema), safe=False)  # only nanoseconds lose digits


def delta_schema(schema: pa.Schema) -> pa.Schema:
    """Schema of such a table."""
    return convert_schema(schema, _type)


def _type(kind: pa.DataType) -> pa.DataType:
    if pa.types.is_timestamp(kind):
        return pa.timestamp("us", "UTC" if kind.tz else None)
    return pa.binary() if pa.types.is_fixed_size_binary(kind) else _TYPES.get(kind, kind)


_ATTEMPTS = 8
_PAUSE_S = 0.1
_RETRIES = 100  # retries of deltalake after commits of other units


class DeltaDestination(ParquetDestination):
    """A table, created by the first result.

    Args:
        store: Folder of the table, notes and lock.
        location: The same folder for deltalake.
        options: Further options of deltalake.
    """

    def __init__(self, store: Store, location: str, options: Mapping[str, str]) -> None:
        super().__init__(store)
        self._location, self._options = location, dict(options)
        self._lock = threading.Lock()
        self._table: Any = None

    def prepare(self) -> None:
        """Create and probe the store.

        Raises:
            ScoringError: It contains another table, or results without a table.
        """
        self._store.prepare()
        if any(map(RESULT.fullmatch, self._store.names())):
            raise ScoringError(
                f"{self._location} holds results of graphkiln score that are no Delta table",
                hint="leave out --format delta, or name another --out",
            )
        with self._lock:
            self._files()

    def committed_ids(self) -> Iterator[str]:
        """Yield the units of the log's newest version."""
        with self._lock:
            return iter(self._files())

    def commit(self, result: Result) -> None:
        """Write a file and add it to the log."""
        attempt = uuid.uuid4().hex
        _delta_schema(result.table.schema)  # before writing
        typed = replace(result, table=as_delta(result.table))
        name, content = f"{result.unit_id}-{attempt}.parquet", encode_result(typed, attempt)
        self._store.create(name, content)
        try:
            with self._lock:
                self._commit(result, name, len(content))
        except StoreError:  # it may be unknown whether it was committed
            raise
        except ScoringError:
            self._store.delete(name)
            raise

    def describe(self, unit_ids: Iterable[str]) -> Iterator[Committed]:
        """Read the footers of the files."""
        with self._lock:
            files = self._files()
        return self._describe_files((unit_id, files[unit_id]) for unit_id in unit_ids if unit_id in files)

    def read(self, unit_id: str, columns: Sequence[str]) -> pa.Table:
        """Read columns of the unit's file."""
        with self._lock:
            name = self._files().get(unit_id)
        if name is None:
            raise ScoringError(f"unit {unit_id} has no result in {self._location}")
        return self._read_file(name, columns)

    def remove(self, unit_ids: Iterable[str]) -> None:
        """Remove the files from the log in one commit; older versions of the table keep them."""
        from deltalake.transaction import RemoveAction

        with self._lock:
            files = self._files()
            names = [files[unit_id] for unit_id in unit_ids if unit_id in files]
            if names:
                now_ms = int(time.time() * 1000)
                actions = [RemoveAction(path=name, deletion_timestamp=now_ms, data_change=True) for name in names]
                self._write(actions, None)

    def _commit(self, result: Result, name: str, size: int) -> None:
        for attempt in range(_ATTEMPTS):
            table = self._opened(result.table.schema)
            version = table.transaction_version(result.unit_id)
            if version is not None:
                standing = self._files().get(result.unit_id)
                if standing == name:  # the response to an earlier attempt was lost
                    return
                if standing is not None:
                    raise CommitConflict(f"unit {result.unit_id} has a result already")
            try:
                self._write([_add_action(result, name, size)], (result.unit_id, (version or 0) + 1))
            except StoreError:
                if attempt == _ATTEMPTS - 1:
                    raise
                time.sleep(_PAUSE_S * 2**attempt)
            else:
                return

    def _files(self) -> dict[str, str]:
        """Unit -> file of its result in the log's newest version."""
        table = self._opened(None)
        if table is None:
            return {}
        files = {}
        for path in pa.table(table.get_add_actions()).column("path").to_pylist():
            if not (found := DELTA_FILE.fullmatch(path)):
                raise ScoringError(
                    f"{self._location}: {path} is no file of graphkiln score, or the table was compacted meanwhile",
                    hint="compact a table (OPTIMIZE) when its runs are over; choose another destination for new ones",
                )
            if found[1] in files:
                raise ScoringError(
                    f"{self._location} has two results of unit {found[1]}: was an older version of the table restored?",
                    hint="restore the newest version, or choose another destination",
                )
            files[found[1]] = path
        return files

    def _opened(self, schema: pa.Schema | None) -> Any:
        """Open the table, or create it from a schema; None if neither is possible."""
        import deltalake

        try:
            if self._table is not None:
                self._table.update_incremental()
            elif deltalake.DeltaTable.is_deltatable(self._location, self._options):
                self._table = deltalake.DeltaTable(self._location, storage_options=self._options)
            elif schema is not None:
                self._table = self._create(_delta_schema(schema))
        except (deltalake.exceptions.DeltaError, OSError) as error:
            raise self._explain(error) from error
        if self._table is not None and schema is not None and self._table.schema() != _delta_schema(schema):
            raise ScoringError(
                f"{self._location} has other columns than the results: {self._table.schema().to_json()}",
                hint="choose another destination",
            )
        return self._table

    def _create(self, schema: Any) -> Any:
        import deltalake

        try:
            return deltalake.DeltaTable.create(self._location, schema, storage_options=self._options)
        except deltalake.exceptions.DeltaError:  # another worker may have created it
            if not deltalake.DeltaTable.is_deltatable(self._location, self._options):
                raise
            return deltalake.DeltaTable(self._location, storage_options=self._options)

    def _write(self, actions: list[Any], application: tuple[str, int] | None) -> None:
        """Commit actions, optionally as an application.

        Raises:
            StoreError: The commit failed, or its outcome is unknown: another attempt was first, or the store fails.
        """
        import deltalake

        transactions = [deltalake.Transaction(*application)] if application else None
        properties = deltalake.CommitProperties(app_transactions=transactions, max_commit_retries=_RETRIES)
        try:
            self._table.create_write_transaction(
                actions, mode="append", schema=self._table.schema(), commit_properties=properties
            )
        except (deltalake.exceptions.DeltaError, OSError) as error:
            raise self._explain(error) from error

    def _explain(self, error: Exception) -> StoreError:
        return StoreError(f"{self._location}: {error}", hint="is it a Delta table that may be written?", passing=True)


def _add_action(result: Result, name: str, size: int) -> Any:
    from deltalake.transaction import AddAction

    stats = {"numRecords": len(result.table), "nullCount": {"error": len(result.table) - result.errors}}
    return AddAction(
        path=name,
        size=size,
        partition_values={},
        modification_time=int(time.time() * 1000),
        data_change=True,
        stats=json.dumps(stats),
    )


def _delta_schema(schema: pa.Schema) -> Any:
    import deltalake

    try:
        return deltalake.Schema.from_arrow(delta_schema(schema))
    except Exception as error:  # deltalake raises no more specific error
        words = str(error).splitlines()[0]
        raise ScoringError(f"Delta has no column for this: {words}", hint="leave it out of --keep-columns") from error
