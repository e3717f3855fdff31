"""Parquet files whose rows hold images, or their paths. A range is some row groups, or some rows of a large one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import pyarrow as pa
import pyarrow.parquet as pq

from graphkiln_backend.graph.files import MIB
from graphkiln_backend.scoring.errors import InputChanged, ScoringError
from graphkiln_backend.scoring.rows import Row
from graphkiln_backend.scoring.sources.ahead import map_ahead
from graphkiln_backend.scoring.sources.listing import check_addresses
from graphkiln_backend.scoring.sources.names import as_id, checked_text, decode_part, digest, encode_part
from graphkiln_backend.scoring.sources.parquet_columns import (
    ImageColumn,
    as_ids,
    column_of,
    find_image_column,
    plain_type,
    type_of,
)
from graphkiln_backend.scoring.sources.parquet_rows import ImageTable
from graphkiln_backend.scoring.sources.places import Place, locate
from graphkiln_backend.scoring.sources.reader import REPEATED, Columns, refuse_replan
from graphkiln_backend.scoring.sources.repeats import Repeats
from graphkiln_backend.scoring.sources.storage import StoredFile
from graphkiln_backend.scoring.units import InputRange, Unit

KIND = "parquet"
_IDS_AT_A_TIME = 1 << 16
# Of a row group of images: whoever reads its last piece reads all that stand before, which this bounds.
_MOST_PIECES = 16
_TAIL = 1 << 16


@dataclass(frozen=True, kw_only=True, slots=True)
class _Extent:
    """A range of a file.

    Attributes:
        first: Its first row group.
        last: Its last row group.
        skipped: Rows of the first row group that do not belong to it.
        before: Rows of the file that stand before it.
        rows: How many it has.
        size_bytes: How much these row groups take, or their share of it.
    """

    first: int
    last: int
    skipped: int
    before: int
    rows: int
    size_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class _Footer:
    """What is planned by: of a file, its place, columns and row groups."""

    file: StoredFile
    digest: str
    image: ImageColumn
    kept: Mapping[str, pa.DataType]
    groups: list[tuple[int, int]]


class ParquetReader:
    """Rows of Parquet files: images as bytes, as `{bytes, path}`, or by their paths, relative to the file's folder.

    A row's id is what stands in the column of ids; else the path, where images are named by one; else
    `FILE:NUMBER`, the row's place.

    Args:
        columns: Which of them are read.
    """

    def __init__(self, columns: Columns) -> None:
        self._columns = columns

    def ranges(self, place: Place, files: Iterator[StoredFile], rows: int) -> Iterator[InputRange]:
        """Row groups, put together until there are enough rows."""
        with Repeats() as repeats:
            seen: list[str] = []
            first: _Footer | None = None
            for footer in map_ahead(partial(self._read_footer, place), files):
                first = first or footer
                _check_alike(first, footer)
                path = place.below(footer.file.path)
                if self._id_column(footer.image):
                    seen.append(footer.file.path)
                    self._note_ids(path, footer.image, repeats)
                for extent in _cut(footer.groups, rows, split_all=footer.image.is_path):
                    yield _range(path, footer, extent)
            repeats.check(lambda: self._all_ids(place, seen), REPEATED)

    def rows(self, unit: Unit) -> Iterator[Row]:
        """The rows of a range, some at a time: memory holds their page, however large their row group is."""
        name, stamp, first, last, skipped, before, rows = decode_part(unit.part)
        place = locate(unit.path)
        with _opened(place, stamp) as file:
            image = find_image_column(file.schema_arrow, self._columns, unit.path)
            table = ImageTable(
                file=file,
                place=place,
                name=as_id(name),
                image=image,
                named=self._id_column(image),
                kept=self._columns.kept,
            )
            yield from table.rows(range(first, last + 1), skipped, before, rows)
        found = place.storage.find(place.path)
        if not found or found.stamp != stamp:
            raise InputChanged(f"{unit.path} has changed while it was read")

    def replan(self, unit: Unit) -> Iterator[InputRange]:
        """Impossible: what was row group 7 may now be another."""
        raise refuse_replan(unit)

    def _note_ids(self, path: Place, image: ImageColumn, repeats: Repeats) -> None:
        named = self._id_column(image)
        for ids in _read_ids(path, named):
            repeats.add(ids)
            if image.is_path and named == image.name:
                check_addresses("\n".join(ids).encode(), path.text)

    def _id_column(self, image: ImageColumn) -> str:
        return self._columns.id or (image.name if image.is_path else "")

    def _all_ids(self, place: Place, files: list[str]) -> Iterator[str]:
        for name in files:
            path = place.below(name)
            with _opened(path, None) as file:
                image = find_image_column(file.schema_arrow, self._columns, path.text)
            for ids in _read_ids(path, self._id_column(image)):
                yield from ids

    def _read_footer(self, place: Place, stored: StoredFile) -> _Footer:
        path = place.below(stored.path)
        with path.storage.open(path.path, stored.stamp) as raw:
            raw.seek(max(0, stored.size - _TAIL))
            tail = raw.read()
        with _opened(path, stored.stamp) as file:
            metadata = file.metadata
            groups = [metadata.row_group(index) for index in range(metadata.num_row_groups)]
            return _Footer(
                file=stored,
                digest=digest(stored.path, stored.stamp, tail[-metadata.serialized_size - 8 :]),
                image=find_image_column(file.schema_arrow, self._columns, path.text),
                kept={name: plain_type(type_of(file.schema_arrow, name)) for name in self._columns.kept},
                groups=[(group.num_rows, group.total_byte_size) for group in groups],
            )


def _check_alike(first: _Footer, other: _Footer) -> None:
    """Refuses files whose columns to be carried along differ: nobody could read the answers of both as one table."""
    for name, kind in other.kept.items():
        if kind != first.kept[name]:
            raise ScoringError(
                f"column '{name}' is {kind} in {other.file.path}, and {first.kept[name]} in {first.file.path}",
                hint="leave it out of --keep-columns, or write the files with one type of it",
            )


def _range(path: Place, footer: _Footer, extent: _Extent) -> InputRange:
    values = (extent.first, extent.last, extent.skipped, extent.before, extent.rows)
    return InputRange(
        path=checked_text(path.text),
        part=encode_part(KIND, (footer.file.path, footer.file.stamp, *values)),
        identity=digest(footer.digest, *map(str, values)),
        rows=extent.rows,
        size_bytes=extent.size_bytes,
    )


def _cut(groups: list[tuple[int, int]], rows: int, *, split_all: bool) -> Iterator[_Extent]:
    """Ranges of about as many rows, from row groups of (rows, bytes)."""
    first = count = size = before = 0
    for index, (group_rows, group_size) in enumerate(groups):
        if group_rows >= 2 * rows:
            if count:
                yield _Extent(
                    first=first, last=index - 1, skipped=0, before=before - count, rows=count, size_bytes=size
                )
            yield from _split(index, group_rows, group_size, before, rows if split_all else _piece(group_rows, rows))
            first, count, size = index + 1, 0, 0
        else:
            count, size = count + group_rows, size + group_size
            if count >= rows:
                end = before + group_rows
                yield _Extent(first=first, last=index, skipped=0, before=end - count, rows=count, size_bytes=size)
                first, count, size = index + 1, 0, 0
        before += group_rows
    if count:
        yield _Extent(first=first, last=len(groups) - 1, skipped=0, before=before - count, rows=count, size_bytes=size)


def _piece(group_rows: int, rows: int) -> int:
    return max(rows, -(-group_rows // _MOST_PIECES))


def _split(index: int, group_rows: int, group_size: int, before: int, piece: int) -> Iterator[_Extent]:
    for skipped in range(0, group_rows, piece):
        rows = min(piece, group_rows - skipped)
        size = group_size * rows // group_rows
        yield _Extent(first=index, last=index, skipped=skipped, before=before + skipped, rows=rows, size_bytes=size)


@contextmanager
def _opened(path: Place, stamp: str | None) -> Iterator[pq.ParquetFile]:
    """A file whose errors are told as ours."""
    with path.storage.open(path.path, stamp) as raw:
        try:
            # Without these two, Arrow reads a row group as a whole before it gives its first row.
            with pq.ParquetFile(raw, pre_buffer=False, buffer_size=MIB, page_checksum_verification=True) as file:
                yield file
        except (pa.ArrowException, OSError) as error:
            raise ScoringError(f"{path.text} is no sound Parquet file: {error}") from error


def _read_ids(path: Place, column: str) -> Iterator[list[str]]:
    with _opened(path, None) as file:
        for batch in file.iter_batches(_IDS_AT_A_TIME, columns=[column], use_threads=False):
            yield as_ids(column_of(batch, column), column, path.text)
