"""Parquet files, one per unit, named by its id, in a folder or an object store.

Names that begin with `_` are notes, which readers of Parquet folders ignore.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import islice

import pyarrow as pa
import pyarrow.parquet as pq

from graphkiln_backend.scoring.destinations.base import Committed, Destination, Result
from graphkiln_backend.scoring.destinations.store import Notes, Store
from graphkiln_backend.scoring.errors import CommitConflict, ScoringError, StoreError
from graphkiln_backend.scoring.messages import ID_DIGITS

_UNIT, _CONFIGURATION, _ERRORS, _ATTEMPT = (
    f"graphkiln.{key}".encode() for key in ("unit", "configuration", "errors", "attempt")
)


def encode_result(result: Result, attempt: str) -> memoryview:
    """Encode a result as a Parquet file.

    Args:
        result: The result.
        attempt: Unique name of the attempt.
    """
    table = result.table.replace_schema_metadata(
        {
            _UNIT: result.unit_id,
            _CONFIGURATION: result.configuration,
            _ERRORS: str(result.errors),
            _ATTEMPT: attempt,
        }
    )
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, compression="zstd", write_page_checksum=True)
    return memoryview(sink.getvalue())


DELTA_LOG = "_delta_log"
LEDGER_NOTE = "_ledger.json"  # names the ledger of a folder, if it has one
_SUFFIX = ".parquet"
RESULT = re.compile(rf"([0-9a-f]{{{ID_DIGITS}}})\.parquet")  # name of a unit's file
# Name of a unit's file in a Delta table, whose log decides whether it is valid.
DELTA_FILE = re.compile(rf"([0-9a-f]{{{ID_DIGITS}}})-[0-9a-f]{{32}}\.parquet")
_READERS = 16
_PIECE = 1024


def object_name(unit_id: str) -> str:
    """Name of a unit's file."""
    return f"{unit_id}{_SUFFIX}"


class ParquetDestination(Destination):
    """Files of a store."""

    has_ledger = False  # whether a log or ledger decides which files are valid

    def __init__(self, store: Store) -> None:
        self._store = store

    @property
    def notes(self) -> Notes:
        """Notes in the same store."""
        return self._store

    def prepare(self) -> None:
        """Create and probe the store.

        Raises:
            ScoringError: It has no exclusive creation, contains files that could be read as results, is a Delta table,
                or has a ledger.
        """
        self._store.prepare()
        for name in self._store.names():
            self._refuse_others(name)
            if name.endswith(_SUFFIX) and not name.startswith("_") and not RESULT.fullmatch(name):
                raise ScoringError(
                    f"{self._store.place(name)} is no result of graphkiln, and would be read as one",
                    hint="choose an empty destination",
                )

    def committed_ids(self) -> Iterator[str]:
        """Yield the units of all files.

        Raises:
            ScoringError: It is a Delta table, or has a ledger.
        """
        for name in self._store.names():
            self._refuse_others(name)
            if found := RESULT.fullmatch(name):
                yield found[1]

    def commit(self, result: Result) -> None:
        """Create the unit's file exclusively."""
        content = encode_result(result, attempt=uuid.uuid4().hex)
        if not self._store.create(object_name(result.unit_id), content):
            raise CommitConflict(f"unit {result.unit_id} has a result already")

    def describe(self, unit_ids: Iterable[str]) -> Iterator[Committed]:
        """Read the footers of the files, several at a time."""
        return self._describe_files((unit_id, object_name(unit_id)) for unit_id in unit_ids)

    def read(self, unit_id: str, columns: Sequence[str]) -> pa.Table:
        """Read columns of the unit's file."""
        return self._read_file(object_name(unit_id), columns)

    def remove(self, unit_ids: Iterable[str]) -> None:
        """Delete the files."""
        for unit_id in unit_ids:
            self._store.delete(object_name(unit_id))

    def _refuse_others(self, name: str) -> None:
        """Refuse a folder with a log or ledger."""
        if name == DELTA_LOG or DELTA_FILE.fullmatch(name):
            raise ScoringError(f"{self._store.place('')} is a Delta table", hint="--format delta, or another --out")
        if name == LEDGER_NOTE and not self.has_ledger:
            database = json.loads(self._store.read(LEDGER_NOTE) or b"{}").get("database", "a database")
            raise ScoringError(
                f"{self._store.place('')} has a ledger in {database}, which says what counts",
                hint=f"--ledger {database}, or another --out",
            )

    def _read_file(self, name: str, columns: Sequence[str]) -> pa.Table:
        """Read columns in one thread, and verify the checksums of the pages."""
        try:
            with pq.ParquetFile(self._store.open(name), page_checksum_verification=True) as file:
                return file.read(columns=list(columns), use_threads=False)
        except (pa.ArrowException, OSError) as error:
            raise ScoringError(f"{self._store.place(name)} cannot be read: {error}") from error

    def _describe_files(self, files: Iterable[tuple[str, str]]) -> Iterator[Committed]:
        """Read the footers of units' files."""
        waiting = iter(files)
        with ThreadPoolExecutor(_READERS, thread_name_prefix="footers") as pool:
            while piece := list(islice(waiting, _PIECE)):
                yield from pool.map(lambda file: self._describe_file(*file), piece)

    def _describe_file(self, unit_id: str, name: str) -> Committed:
        described = partial(Committed, unit_id=unit_id, place=self._store.place(name))
        try:
            footer = pq.read_metadata(self._store.open(name))
            written = footer.metadata or {}
            if written.get(_UNIT) != unit_id.encode():
                return described(damage="it does not hold the result of the unit that it is named after")
            errors, counted = int(written[_ERRORS]), _count_errors(footer)
            configuration = written[_CONFIGURATION].decode()
        except StoreError:
            raise
        except (pa.ArrowException, OSError, ScoringError, KeyError, ValueError, AttributeError) as error:
            return described(damage=str(error))
        if errors != counted:
            return described(damage=f"its metadata has {errors} rows with an error, its data {counted}")
        return described(configuration=configuration, scored=footer.num_rows - errors, errors=errors)


def _count_errors(footer: pq.FileMetaData) -> int:
    """Count the rows with an error, from the statistics of the file."""
    column = next(index for index in range(footer.num_columns) if footer.schema.column(index).path == "error")
    groups = [footer.row_group(index) for index in range(footer.num_row_groups)]
    return sum(group.num_rows - group.column(column).statistics.null_count for group in groups if group.num_rows)
