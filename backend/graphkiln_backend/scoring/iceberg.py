"""Apache Iceberg by pyiceberg: catalogs, the files of a snapshot, and commits.

A table is named `iceberg:CATALOG/NAMESPACE.TABLE`. Catalogs are configured as for every program that uses pyiceberg:
by name in `.pyiceberg.yaml`, or in environment variables `PYICEBERG_CATALOG__NAME__URI` and so on.
Source: the Iceberg table specification, "Scan Planning", "Column Projection" and "Optimistic Concurrency".
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, BinaryIO, cast

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from graphkiln_backend.graph.modules import require_packages
from graphkiln_backend.graph.text import redact
from graphkiln_backend.scoring.column_types import convert_schema
from graphkiln_backend.scoring.errors import ScoringError, SourceUnavailable, StoreError

PREFIX = "iceberg:"
FORM = f"{PREFIX}CATALOG/NAMESPACE.TABLE"
_NAME = re.compile(r"iceberg:(?P<catalog>[^/@]+)/(?P<table>[^/@]+\.[^/@]+)(?:@(?P<snapshot>[^/@]+))?")
_COMPACT = "rewrite its files (in Spark: CALL system.rewrite_data_files), and score the new snapshot"
# Arrow's large types, which pyiceberg prefers, and what results have.
_SMALL = {pa.large_string(): pa.string(), pa.large_binary(): pa.binary()}
# Iceberg has no integers below 32 bits, unsigned ones, half floats or nanoseconds: as for Delta, wider types are
# written. Source: "Primitive Types" of the specification, version 2.
_TYPES = _SMALL | {
    pa.null(): pa.string(),
    pa.int8(): pa.int32(),
    pa.int16(): pa.int32(),
    pa.uint8(): pa.int32(),
    pa.uint16(): pa.int32(),
    pa.uint32(): pa.int64(),
    pa.uint64(): pa.decimal128(20),
    pa.float16(): pa.float32(),
    pa.string_view(): pa.string(),
    pa.binary_view(): pa.binary(),
    pa.date64(): pa.date32(),
}
_RETRIES = "commit.retry.num-retries"
_READERS = 16
_DELETES_CACHED = 32  # files with positions of deleted rows


@dataclass(frozen=True, kw_only=True, slots=True)
class TableName:
    """A table of a catalog.

    Attributes:
        catalog: Name of the catalog in the configuration of pyiceberg.
        table: Namespace and table, separated by dots.
        snapshot: Id of a snapshot, or name of a branch or tag; empty for the newest snapshot.
    """

    catalog: str
    table: str
    snapshot: str = ""

    @classmethod
    def parse(cls, text: str) -> TableName:
        """Parse `iceberg:CATALOG/NAMESPACE.TABLE[@SNAPSHOT]`.

        Raises:
            ScoringError: The text has another form.
        """
        found = _NAME.fullmatch(text)
        if not found:
            raise ScoringError(
                f"'{redact(text)}' names no Iceberg table", hint=f"use {FORM}, optionally with @SNAPSHOT"
            )
        return cls(catalog=found["catalog"], table=found["table"], snapshot=found["snapshot"] or "")

    @property
    def text(self) -> str:
        """The name without a snapshot."""
        return f"{PREFIX}{self.catalog}/{self.table}"


class ConcurrentCommit(StoreError):
    """Another writer changed the table first; nothing was written."""


@contextmanager
def explained(what: str, unavailable: Callable[[str], ScoringError]) -> Iterator[None]:
    """Translate errors of pyiceberg and of the clients of catalogs.

    Args:
        what: The table, for messages.
        unavailable: Makes the error of a catalog or store that does not answer.
    """
    from pyiceberg import exceptions as iceberg
    from requests import RequestException
    from sqlalchemy.exc import SQLAlchemyError

    try:
        yield
    except (iceberg.NoSuchTableError, iceberg.NoSuchNamespaceError) as error:
        raise ScoringError(
            f"there is no {what}: {_words(error)}", hint="check the name; tables are listed by pyiceberg list"
        ) from error
    except iceberg.CommitFailedException as error:
        raise ConcurrentCommit(f"{what}: {_words(error)}", passing=True) from error
    except (iceberg.UnauthorizedError, iceberg.ForbiddenError, iceberg.OAuthError, iceberg.BadRequestError) as error:
        raise ScoringError(
            f"the catalog refuses access to {what}: {_words(error)}", hint="check the credentials of the catalog"
        ) from error
    except (iceberg.RESTError, RequestException, SQLAlchemyError, OSError) as error:
        raise unavailable(f"{what}: {_words(error)}") from error
    except (
        iceberg.ValidationException,
        iceberg.NotInstalledError,
        iceberg.ResolveError,
        ValueError,
        NotImplementedError,
    ) as error:
        raise ScoringError(f"{what}: {_words(error)}") from error


def _words(error: Exception) -> str:
    lines = str(error).splitlines() or [type(error).__name__]
    return redact(lines[0])


def store_unavailable(message: str) -> ScoringError:
    """Error of a destination that does not answer."""
    return StoreError(message, hint="is its catalog running, and configured on every node?", passing=True)


def _source_unavailable(message: str) -> ScoringError:
    return SourceUnavailable(message, hint="is its catalog running, and configured on every node?")


def load_catalog(name: TableName, unavailable: Callable[[str], ScoringError] = _source_unavailable) -> Any:
    """Load a catalog by its name.

    Raises:
        ScoringError: There is no such catalog, or `unavailable` for one that does not answer.
    """
    require_packages("Iceberg", ("pyiceberg",), extra="iceberg")
    from pyiceberg.catalog import load_catalog as load

    try:
        with explained(f"catalog {name.catalog}", unavailable):
            return load(name.catalog)
    except ScoringError as error:
        if "URI missing" not in error.message:
            raise
        raise ScoringError(
            f"pyiceberg has no catalog named '{name.catalog}'",
            hint="configure it on every node, in .pyiceberg.yaml or by "
            f"PYICEBERG_CATALOG__{name.catalog.upper()}__URI and so on",
        ) from error


@dataclass(frozen=True, kw_only=True, slots=True)
class ScannedFile:
    """A data file of a snapshot.

    Attributes:
        size: Size in bytes.
        rows: Rows, including deleted ones.
        deletes: Location and format of files with positions of deleted rows.
        constants: Values of partition columns by field id, as JSON values.
    """

    path: str
    size: int
    rows: int
    deletes: tuple[tuple[str, str], ...]
    constants: Mapping[str, Any]


class Snapshot:
    """A snapshot of a table: its columns and files.

    Args:
        name: The table.

    Raises:
        ScoringError: There is no such table or snapshot, or it cannot be read.
    """

    def __init__(self, name: TableName) -> None:
        self._name = name
        # Before the imports: it says which extra is missing.
        catalog = load_catalog(name)
        with explained(f"table {name.text}", _source_unavailable):
            self._table = catalog.load_table(name.table)
        from pyiceberg.io.pyarrow import schema_to_pyarrow

        found = self._find(name.snapshot)
        self.id: int = found.snapshot_id
        self.location: str = self._table.metadata.location
        scan = self._table.scan(snapshot_id=self.id)
        self._scan, self._columns = scan, scan.projection()
        self.schema = convert_schema(schema_to_pyarrow(self._columns, include_field_ids=False), _small)
        self._read_deletes = lru_cache(_DELETES_CACHED)(self._read_delete_file)

    def __str__(self) -> str:
        return f"snapshot {self.id} of {self._name.text}"

    def _find(self, wanted: str) -> Any:
        metadata = self._table.metadata
        if not wanted:
            if (current := metadata.current_snapshot()) is None:
                raise ScoringError(f"{self._name.text} has no snapshot, and so no rows")
            return current
        is_id = wanted.isdecimal() and wanted not in metadata.refs
        found = metadata.snapshot_by_id(int(wanted)) if is_id else metadata.snapshot_by_name(wanted)
        if found is None:
            current = metadata.current_snapshot()
            newest = f"{self._name.text}@{current.snapshot_id}" if current else "none"
            raise ScoringError(
                f"{self._name.text} has no snapshot {wanted}: it was expired, or never existed",
                hint=f"the newest one is {newest}; name it to score it, with --replace for results of the other one",
            )
        return found

    def files(self) -> list[ScannedFile]:
        """List the data files, sorted by location.

        Raises:
            ScoringError: A file or its deletes cannot be read.
        """
        with explained(str(self), _source_unavailable):
            try:
                tasks = list(self._scan.plan_files())
            except FileNotFoundError as error:
                raise ScoringError(
                    f"{self}: its metadata is gone: {_words(error)}",
                    hint="score another snapshot, or restore the files",
                ) from error
            except (ValueError, NotImplementedError) as error:
                if "equality delete" not in str(error):
                    raise
                raise ScoringError(
                    f"{self} has equality deletes, which pyiceberg cannot read", hint=_COMPACT
                ) from error
            return sorted(map(self._scanned, tasks), key=lambda file: file.path)

    def _scanned(self, task: Any) -> ScannedFile:
        file = task.file
        if file.file_format.name != "PARQUET":
            raise ScoringError(
                f"{self} has files of {file.file_format.name}, such as {file.file_path}",
                hint=f"supported is Parquet: {_COMPACT}",
            )
        return ScannedFile(
            path=file.file_path,
            size=file.file_size_in_bytes,
            rows=file.record_count,
            deletes=tuple(sorted((one.file_path, one.file_format.name) for one in task.delete_files)),
            constants=self._constants(file),
        )

    def _constants(self, file: Any) -> dict[str, Any]:
        """Values of columns that the file may lack because it was partitioned by them: identity transforms only."""
        from pyiceberg.conversions import to_json
        from pyiceberg.transforms import IdentityTransform

        values: dict[str, Any] = {}
        for index, field in enumerate(self._table.metadata.specs()[file.spec_id].fields):
            value = file.partition[index]
            is_copy = isinstance(field.transform, IdentityTransform) and field.source_id in self._columns.field_ids
            if is_copy and value is not None:
                values[str(field.source_id)] = to_json(self._columns.find_type(field.source_id), value)
        return values

    def deleted(self, path: str, deletes: Iterable[Sequence[str]]) -> npt.NDArray[np.int64]:
        """Read the positions of deleted rows of a file, ascending.

        Raises:
            ScoringError: A file with deletes cannot be read.
        """
        found = [self._read_deletes(*delete).get(path) for delete in deletes]
        positions = [np.asarray(each, np.int64) for each in found if each is not None]
        return np.unique(np.concatenate(positions)) if positions else np.empty(0, np.int64)

    def _read_delete_file(self, path: str, file_format: str) -> Mapping[str, pa.ChunkedArray]:
        # pyiceberg reads position deletes, and deletion vectors of version 3, for whole scans only.
        from pyiceberg.io.pyarrow import _read_deletes
        from pyiceberg.manifest import DataFile, FileFormat

        with explained(f"{self}, deletes in {path}", _source_unavailable):
            try:
                return cast(
                    "Mapping[str, pa.ChunkedArray]",
                    _read_deletes(
                        self._table.io, DataFile.from_args(file_path=path, file_format=FileFormat[file_format])
                    ),
                )
            except FileNotFoundError as error:
                raise ScoringError(f"{self}: {path} is gone, which says which rows are deleted") from error
            except pa.ArrowException as error:
                raise ScoringError(f"{self}: {path}, which says which rows are deleted, is damaged: {error}") from error

    def size(self, path: str) -> int | None:
        """Size of a file in bytes; None if it is gone."""
        with explained(str(self), _source_unavailable):
            try:
                return len(self._table.io.new_input(path))
            except FileNotFoundError:
                return None

    def open(self, path: str) -> BinaryIO:
        """Open a file; its reads raise errors of Arrow.

        Raises:
            ScoringError: It is gone.
            SourceUnavailable: The store does not answer.
        """
        with explained(str(self), _source_unavailable):
            try:
                return cast("BinaryIO", self._table.io.new_input(path).open())
            except FileNotFoundError as error:
                raise ScoringError(
                    f"{self} counts {path}, which is gone: was the snapshot expired?", hint="score another snapshot"
                ) from error

    def project(self, file: pq.ParquetFile, constants: Mapping[str, Any]) -> ProjectedFile:
        """Return a file with the columns of this snapshot, by field ids.

        Raises:
            ScoringError: The file lacks field ids, and the table has no mapping of names.
        """
        from pyiceberg.conversions import from_json
        from pyiceberg.io.pyarrow import pyarrow_to_schema

        values = {int(key): from_json(self._columns.find_type(int(key)), value) for key, value in constants.items()}
        metadata = self._table.metadata
        with explained(str(self), _source_unavailable):
            own = pyarrow_to_schema(file.schema_arrow, metadata.name_mapping(), format_version=metadata.format_version)
        return ProjectedFile(file, self.schema, self._columns, own, values)


class ProjectedFile:
    """A Parquet file, read like `pq.ParquetFile` with the columns of a snapshot.

    Columns may have been added, renamed, moved or widened since the file was written.

    Args:
        file: The file.
        schema: Columns of the snapshot.
        columns: The same, by pyiceberg.
        own: Columns of the file, by pyiceberg.
        constants: Values of partition columns by field id, for files without these columns.
    """

    def __init__(
        self, file: pq.ParquetFile, schema: pa.Schema, columns: Any, own: Any, constants: dict[int, Any]
    ) -> None:
        self._file, self._columns, self._own, self._constants = file, columns, own, constants
        self.schema_arrow = schema
        self.metadata = file.metadata

    def iter_batches(self, batch_size: int, *, columns: Sequence[str], **options: Any) -> Iterator[pa.RecordBatch]:
        """Yield batches with some columns of the snapshot.

        Raises:
            ScoringError: The file cannot have these columns.
        """
        from pyiceberg.io.pyarrow import _to_requested_schema, schema_to_pyarrow
        from pyiceberg.schema import prune_columns
        from pyiceberg.types import ListType, MapType

        projected = self._columns.select(*columns)
        types = {each: projected.find_type(each) for each in projected.field_ids}
        ids = {each for each, kind in types.items() if not isinstance(kind, ListType | MapType)}
        own = prune_columns(self._own, ids, select_full_types=False)
        wanted = [self._columns.find_field(name).field_id for name in columns]
        physical = [self._own.find_column_name(each) for each in wanted if each in self._own.field_ids]
        schema = convert_schema(schema_to_pyarrow(projected, include_field_ids=False), _small)
        for batch in self._file.iter_batches(batch_size, columns=physical, **options):
            with explained("a data file", _source_unavailable):
                found = _to_requested_schema(
                    projected,
                    own,
                    batch,
                    projected_missing_fields=self._constants,
                    downcast_ns_timestamp_to_us=True,
                    allow_timestamp_tz_mismatch=True,
                )
            yield found.cast(schema)


def _small(kind: pa.DataType) -> pa.DataType:
    return _SMALL.get(kind, kind)


def _writable(kind: pa.DataType) -> pa.DataType:
    if pa.types.is_timestamp(kind):
        return pa.timestamp("us", "UTC" if kind.tz else None)
    if pa.types.is_time64(kind):
        return pa.time64("us")
    return _TYPES.get(kind, kind)


def writable_schema(schema: pa.Schema) -> pa.Schema:
    """Columns of results with types of Iceberg; the metadata of a column becomes its documentation."""
    converted = convert_schema(schema, _writable)
    return pa.schema([field.with_metadata(_documented(field.metadata)) for field in converted])


def _documented(metadata: Mapping[bytes, bytes] | None) -> dict[bytes, bytes]:
    words = [f"{key.decode()} {value.decode()}" for key, value in (metadata or {}).items()]
    return {b"doc": "; ".join(words).encode()} if words else {}


class ResultTable:
    """A table to which results are added, as it is now.

    Args:
        name: The table.
        table: The table of pyiceberg.
    """

    def __init__(self, name: TableName, table: Any) -> None:
        self._name, self._table = name, table

    @classmethod
    def load(cls, name: TableName) -> ResultTable | None:
        """Load a table; None if there is none.

        Raises:
            StoreError: The catalog does not answer.
        """
        catalog = load_catalog(name, store_unavailable)
        from pyiceberg.exceptions import NoSuchNamespaceError, NoSuchTableError

        with explained(f"table {name.text}", store_unavailable):
            try:
                return cls(name, catalog.load_table(name.table))
            except (NoSuchTableError, NoSuchNamespaceError):
                return None

    @classmethod
    def create(cls, name: TableName, schema: pa.Schema) -> ResultTable:
        """Create an empty table for results.

        Raises:
            ScoringError: There is no such namespace, or Iceberg has no such columns.
        """
        catalog = load_catalog(name, store_unavailable)
        from pyiceberg.exceptions import NoSuchNamespaceError, TableAlreadyExistsError
        from pyiceberg.io.pyarrow import UnsupportedPyArrowTypeException

        with explained(f"table {name.text}", store_unavailable):
            try:
                return cls(name, catalog.create_table(name.table, writable_schema(schema)))
            except TableAlreadyExistsError:  # another worker was first
                return cls(name, catalog.load_table(name.table))
            except NoSuchNamespaceError as error:
                namespace = name.table.rpartition(".")[0]
                raise ScoringError(
                    f"catalog {name.catalog} has no namespace {namespace}",
                    hint=f"create it: pyiceberg --catalog {name.catalog} create namespace {namespace}",
                ) from error
            except UnsupportedPyArrowTypeException as error:
                raise ScoringError(
                    f"Iceberg has no column for this: {_words(error)}", hint="leave it out of --keep-columns"
                ) from error

    @property
    def location(self) -> str:
        """Location of the table."""
        return str(self._table.metadata.location)

    @property
    def properties(self) -> Mapping[str, str]:
        """Properties of the table's file system, such as its endpoint and credentials."""
        return cast("Mapping[str, str]", self._table.io.properties)

    @property
    def head(self) -> int | None:
        """Id of the newest snapshot."""
        current = self._table.metadata.current_snapshot()
        return current.snapshot_id if current else None

    def keeps_successor(self, base: int | None) -> bool:
        """True if the snapshot that replaced `base` is not expired, or none has."""
        return self.head == base or any(each.parent_snapshot_id == base for each in self._table.metadata.snapshots)

    def find_snapshot(self, key: str, value: str) -> int | None:
        """Find a snapshot with a property."""
        for snapshot in self._table.metadata.snapshots:
            if snapshot.summary is not None and snapshot.summary[key] == value:
                return int(snapshot.snapshot_id)
        return None

    def check_columns(self, schema: pa.Schema) -> pa.Schema:
        """Check that results fit the table, and return their columns with its field ids.

        Raises:
            ScoringError: It has other columns, or is partitioned.
        """
        from pyiceberg.io.pyarrow import schema_to_pyarrow

        own = convert_schema(schema_to_pyarrow(self._table.schema()), _small)
        needed = {field.name: field.type for field in writable_schema(schema)}
        there = {field.name: field.type for field in own}
        if needed != there:
            differ = sorted(name for name in {**needed, **there} if needed.get(name) != there.get(name))
            words = ", ".join(f"{name} {needed.get(name)} (it is {there.get(name)})" for name in differ)
            raise ScoringError(
                f"{self._name.text} has other columns than the results: {words}",
                hint="choose another table; it is created if it is missing",
            )
        if not self._table.spec().is_unpartitioned():
            raise ScoringError(
                f"{self._name.text} is partitioned, but a unit of results is one file", hint="choose another table"
            )
        return own

    def files_below(self, folder: str) -> dict[str, Any]:
        """Find the data files of the newest snapshot in a folder, by their names."""
        from pyiceberg.manifest import ManifestContent

        current = self._table.metadata.current_snapshot()
        found = {}
        with explained(f"table {self._name.text}", store_unavailable):
            for manifest in current.manifests(self._table.io) if current else ():
                if manifest.content == ManifestContent.DATA:
                    for entry in manifest.fetch_manifest_entry(self._table.io, discard_deleted=True):
                        above, _, name = entry.data_file.file_path.rpartition("/")
                        if above == folder:
                            found[name] = entry.data_file
        return found

    def commit(self, added: Sequence[str], removed: Iterable[Any], properties: Mapping[str, str]) -> int:
        """Add and remove files in one snapshot, on top of the newest one that was loaded.

        Args:
            added: Locations of new files.
            removed: Files, as found by `files_below`.
            properties: Properties of the snapshot.

        Returns:
            Id of the snapshot.

        Raises:
            ConcurrentCommit: The table has a newer snapshot.
            StoreError: The outcome is unknown.
        """
        from pyiceberg.io.pyarrow import parquet_file_to_data_file

        table = self._table
        # pyiceberg would try again on top of another snapshot without looking for ours in it first.
        table.metadata = table.metadata.model_copy(update={"properties": {**table.metadata.properties, _RETRIES: "0"}})
        with explained(f"table {self._name.text}", store_unavailable):
            describe = partial(parquet_file_to_data_file, table.io, table.metadata)
            with ThreadPoolExecutor(_READERS, thread_name_prefix="footers") as pool:
                files = list(pool.map(describe, added))
            transaction = table.transaction()
            update = transaction.update_snapshot(snapshot_properties=dict(properties))
            leaving = list(removed)
            with update.overwrite() if leaving else update.fast_append() as producer:
                for file in files:
                    producer.append_data_file(file)
                for file in leaving:
                    producer.delete_data_file(file)
            transaction.commit_transaction()
        return int(producer.snapshot_id)
