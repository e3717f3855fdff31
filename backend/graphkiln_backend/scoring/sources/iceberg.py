"""Iceberg tables: the Parquet files of one snapshot, without deleted rows.

Data files are immutable, so that a snapshot reads the same as long as it is not expired. A row without a column of ids
is identified by its file and position, which deletes of other rows do not change.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, BinaryIO, cast

from graphkiln_backend.scoring.errors import ScoringError, SourceUnavailable
from graphkiln_backend.scoring.iceberg import ProjectedFile, Snapshot, TableName
from graphkiln_backend.scoring.messages import InputRange, Row, Unit
from graphkiln_backend.scoring.sources.base import Columns
from graphkiln_backend.scoring.sources.parquet import ParquetReader, Positions, opened
from graphkiln_backend.scoring.sources.places import Place
from graphkiln_backend.scoring.sources.storage import OpenedFile, StoredFile


class IcebergSource:
    """A snapshot of a table; loaded when it is used.

    Args:
        name: The table, and a snapshot.
        columns: Columns to read.
    """

    def __init__(self, name: TableName, columns: Columns) -> None:
        self._name, self._columns = name, columns

    def ranges(self, rows: int) -> Iterator[InputRange]:
        """Yield ranges of the data files."""
        snapshot = self._reader.snapshot
        files = snapshot.files()
        if not files:
            raise ScoringError(f"{snapshot} has no rows")
        listed = (
            _DataFile(
                path=file.path.removeprefix(f"{snapshot.location.rstrip('/')}/"),
                size=file.size,
                stamp=str(file.size),
                location=file.path,
                further=[list(map(list, file.deletes)), dict(file.constants)],
            )
            for file in files
        )
        is_empty = True
        for found in self._reader.ranges(Place(self._reader.storage, "", self._name.text), listed, rows):
            is_empty = False
            yield found
        if is_empty:
            raise ScoringError(f"{snapshot} has no rows", hint="all of them are deleted")

    def rows(self, unit: Unit) -> Iterator[Row]:
        """Yield the rows of a range."""
        return self._reader.rows(unit)

    @cached_property
    def _reader(self) -> _Reader:
        return _Reader(self._columns, Snapshot(self._name))


@dataclass(frozen=True, kw_only=True, slots=True)
class _DataFile(StoredFile):
    """A data file.

    Attributes:
        location: Full location.
        further: Files with its deleted positions, and values of partition columns.
    """

    location: str
    further: list[Any]


class _Reader(ParquetReader):
    """Parquet files of a snapshot, with its columns.

    Args:
        columns: Columns to read.
        snapshot: The snapshot.
    """

    def __init__(self, columns: Columns, snapshot: Snapshot) -> None:
        super().__init__(columns)
        self.snapshot = snapshot
        self.storage = _SnapshotStorage(snapshot)

    def _place(self, _: Place, file: StoredFile) -> Place:
        assert isinstance(file, _DataFile)  # noqa: S101 - listed by `IcebergSource`
        return self._locate(file.location)

    def _locate(self, text: str) -> Place:
        return Place(self.storage, text, text)

    def _further(self, file: StoredFile) -> list[Any]:
        assert isinstance(file, _DataFile)  # noqa: S101
        return file.further

    @contextmanager
    def _open(self, place: Place, stamp: str | None, further: list[Any]) -> Iterator[ProjectedFile]:
        _, constants = further
        with opened(place, stamp) as file:
            yield self.snapshot.project(file, constants)

    def _deleted(self, place: Place, further: list[Any]) -> Positions:
        deletes, _ = further
        return self.snapshot.deleted(place.path, deletes)


class _SnapshotStorage:
    """The data files of a snapshot, by location. Thread-safe.

    Args:
        snapshot: The snapshot.
    """

    def __init__(self, snapshot: Snapshot) -> None:
        self._snapshot = snapshot

    def walk(self, folder: str) -> Iterator[StoredFile]:
        """Refuse: the files of a snapshot are listed by its manifests.

        Raises:
            ScoringError: Always.
        """
        raise ScoringError(f"{folder} cannot be listed")

    def find(self, path: str) -> StoredFile | None:
        """Look up a data file."""
        size = self._snapshot.size(path)
        return None if size is None else StoredFile(path=path, size=size, stamp=str(size))

    def read(self, path: str, stamp: str | None, part: tuple[int, int] | None = None) -> bytes:  # noqa: ARG002
        """Refuse a path in a column that is relative: data files may be moved at any time.

        Raises:
            ScoringError: Always.
        """
        raise ScoringError(
            f"'{path}' is relative to a data file", hint="paths of images in an Iceberg table must be absolute"
        )

    def open(self, path: str, stamp: str | None = None) -> BinaryIO:
        """Open a data file.

        Raises:
            ScoringError: It is gone, or has another size than when it was written.
        """
        if stamp and (size := self._snapshot.size(path)) not in {None, int(stamp)}:
            raise ScoringError(
                f"{path} has {size} bytes, but {self._snapshot} counts {stamp}: it is damaged", hint="restore the file"
            )
        file = OpenedFile(self._snapshot.open(path), lambda error: SourceUnavailable(f"cannot read {path}: {error}"))
        return cast("BinaryIO", file)
