"""Parquet files with images or their paths. A range is several row groups, or a part of a large one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from graphkiln_backend.graph.errors import InvalidInput
from graphkiln_backend.graph.files import MIB
from graphkiln_backend.scoring.errors import InputChanged, ScoringError
from graphkiln_backend.scoring.messages import InputRange, Row, Unit
from graphkiln_backend.scoring.row_hashes import RowHashes
from graphkiln_backend.scoring.sources.base import (
    REPEATED,
    Columns,
    as_id,
    checked_text,
    decode_part,
    digest,
    encode_part,
    map_ahead,
    refuse_row,
)
from graphkiln_backend.scoring.sources.listing import check_addresses
from graphkiln_backend.scoring.sources.places import Place, load_image, locate
from graphkiln_backend.scoring.sources.storage import StoredFile

KIND = "parquet"
_ROWS_AT_A_TIME = 16
_IDS_AT_A_TIME = 1 << 16
# Maximum pieces of a row group: reading the last one reads all previous ones.
_MOST_PIECES = 16
_TAIL = 1 << 16
# Arrow's errors for a damaged page. Storage errors are not among them: see `OpenedFile`. Nor is exhausted memory, which
# may be temporary.
_DAMAGE = (pa.ArrowInvalid, pa.ArrowNotImplementedError, pa.ArrowSerializationError, OSError)
_BYTES, _PATH = "bytes", "path"
Positions = npt.NDArray[np.int64]  # of rows in a file, ascending
NO_POSITIONS: Positions = np.empty(0, np.int64)


class ParquetReader:
    """Rows of Parquet files: images as bytes, as `{bytes, path}`, or as paths relative to the file's folder.

    A row's id is its value in the column of ids, or else the path of the image, or else `FILE:NUMBER`.
    """

    def __init__(self, columns: Columns) -> None:
        self._columns = columns

    def ranges(self, place: Place, files: Iterator[StoredFile], rows: int) -> Iterator[InputRange]:
        """Yield ranges of row groups with enough rows."""
        with RowHashes() as seen:
            named: list[StoredFile] = []
            first: _Footer | None = None
            for footer in map_ahead(partial(self._read_footer, place), files):
                first = first or footer
                _check_alike(first, footer)
                if self._id_column(footer.image):
                    named.append(footer.file)
                    for ids in self._read_ids(place, footer.file):
                        seen.add(ids)
                yield from self._ranges_of(self._place(place, footer.file), footer, rows)
            seen.refuse_repeated(
                lambda: (one for file in named for ids in self._read_ids(place, file) for one in ids), REPEATED
            )

    def rows(self, unit: Unit) -> Iterator[Row]:
        """Yield the rows of a range; memory use is a page, independent of the row group."""
        name, stamp, first, last, skipped, before, rows, *further = decode_part(unit.part)
        place = self._locate(unit.path)
        with self._open(place, stamp, further) as file:
            image = find_image_column(file.schema_arrow, self._columns, unit.path)
            deleted = self._deleted(place, further)
            named = self._id_column(image)
            table = _ImageTable(file, place, as_id(name), image, named, self._columns.kept, deleted)
            for group in range(first, last + 1):
                taken = min(rows, file.metadata.row_group(group).num_rows - skipped)
                yield from table.rows(group, skipped, taken, before)
                skipped, before, rows = 0, before + taken, rows - taken
        found = place.storage.find(place.path)
        if not found or found.stamp != stamp:
            raise InputChanged(f"{unit.path} has changed while it was read")

    # A table format overrides these.

    def _place(self, place: Place, file: StoredFile) -> Place:
        """Place of a file that was listed below another place."""
        return place.below(file.path)

    def _locate(self, text: str) -> Place:
        """Place of a file by the path of its units."""
        return locate(text)

    def _further(self, _: StoredFile) -> list[Any]:
        """Values for the parts of a file's units, which the next two methods receive."""
        return []

    def _open(self, place: Place, stamp: str | None, _: list[Any]) -> AbstractContextManager[Any]:
        """Open a file, as `pq.ParquetFile`."""
        return opened(place, stamp)

    def _deleted(self, _: Place, __: list[Any]) -> Positions:
        """Positions of rows that do not count."""
        return NO_POSITIONS

    def _id_column(self, image: ImageColumn) -> str:
        return self._columns.id or (image.name if image.is_path else "")

    def _ranges_of(self, path: Place, footer: _Footer, rows: int) -> Iterator[InputRange]:
        further = self._further(footer.file)
        deleted = self._deleted(path, further)
        for extent in _cut(footer.groups, rows, split_all=footer.image.is_path):
            *values, size_bytes = extent
            gone = _between(deleted, extent.before, extent.before + extent.rows)
            marks = [gone.tobytes()] if len(gone) else []
            if len(gone) < extent.rows:
                yield InputRange(
                    path=checked_text(path.text),
                    part=encode_part(KIND, (footer.file.path, footer.file.stamp, *values, *further)),
                    identity=digest(footer.digest, *map(str, values), *marks),
                    rows=extent.rows - len(gone),
                    size_bytes=size_bytes,
                )

    def _read_ids(self, place: Place, stored: StoredFile) -> Iterator[list[str]]:
        path, further, before = self._place(place, stored), self._further(stored), 0
        deleted = self._deleted(path, further)
        with self._open(path, None, further) as file:
            image = find_image_column(file.schema_arrow, self._columns, path.text)
            column = self._id_column(image)
            for batch in file.iter_batches(_IDS_AT_A_TIME, columns=[column], use_threads=False):
                kept, _ = _without(deleted, batch, before)
                before += len(batch)
                ids = as_ids(column_of(kept, column), column, path.text)
                if image.is_path and column == image.name:
                    check_addresses("\n".join(ids).encode(), path.text)
                yield ids

    def _read_footer(self, place: Place, stored: StoredFile) -> _Footer:
        path = self._place(place, stored)
        with path.storage.open(path.path, stored.stamp) as raw:
            raw.seek(max(0, stored.size - _TAIL))
            tail = raw.read()
        with self._open(path, stored.stamp, self._further(stored)) as file:
            metadata = file.metadata
            groups = [metadata.row_group(index) for index in range(metadata.num_row_groups)]
            return _Footer(
                file=stored,
                digest=digest(stored.path, stored.stamp, tail[-metadata.serialized_size - 8 :]),
                image=find_image_column(file.schema_arrow, self._columns, path.text),
                kept={name: plain_type(type_of(file.schema_arrow, name)) for name in self._columns.kept},
                groups=[(group.num_rows, group.total_byte_size) for group in groups],
            )


def _between(positions: Positions, begin: int, end: int) -> Positions:
    first, last = np.searchsorted(positions, (begin, end))
    return positions[first:last]


def _without(deleted: Positions, batch: pa.RecordBatch, before: int) -> tuple[pa.RecordBatch, Positions]:
    """Return the rows of a batch that are not deleted, and their positions in the file."""
    positions = np.arange(before, before + len(batch), dtype=np.int64)
    if len(gone := _between(deleted, before, before + len(batch))):
        positions = np.setdiff1d(positions, gone, assume_unique=True)
        batch = batch.take(pa.array(positions - before))
    return batch, positions


@dataclass(frozen=True, kw_only=True, slots=True)
class _Footer:
    """Columns of a file, and rows and bytes of its row groups."""

    file: StoredFile
    digest: str
    image: ImageColumn
    kept: Mapping[str, pa.DataType]
    groups: list[tuple[int, int]]


class _Extent(NamedTuple):
    """A range of a file: first and last row group, offset of rows, and bytes."""

    first: int
    last: int
    skipped: int
    before: int
    rows: int
    size_bytes: int


def _cut(groups: list[tuple[int, int]], rows: int, *, split_all: bool) -> Iterator[_Extent]:
    """Divide into ranges of similar size: small row groups are combined, large ones split."""
    first = count = size = before = 0
    for index, (group_rows, group_size) in enumerate(groups):
        is_large = group_rows >= 2 * rows
        if is_large and count:
            yield _Extent(first, index - 1, 0, before - count, count, size)
        if is_large:
            piece = rows if split_all else max(rows, -(-group_rows // _MOST_PIECES))
            for skipped in range(0, group_rows, piece):
                taken = min(piece, group_rows - skipped)
                yield _Extent(index, index, skipped, before + skipped, taken, group_size * taken // group_rows)
            first, count, size = index + 1, 0, 0
        else:
            count, size = count + group_rows, size + group_size
            if count >= rows:
                yield _Extent(first, index, 0, before + group_rows - count, count, size)
                first, count, size = index + 1, 0, 0
        before += group_rows
    if count:
        yield _Extent(first, len(groups) - 1, 0, before - count, count, size)


def _check_alike(first: _Footer, other: _Footer) -> None:
    """Refuse files with different kept columns, because the results must form one table."""
    for name, kind in other.kept.items():
        if kind != first.kept[name]:
            raise ScoringError(
                f"column '{name}' is {kind} in {other.file.path}, but {first.kept[name]} in {first.file.path}",
                hint="remove it from --keep-columns, or convert the files to one type",
            )


@contextmanager
def opened(path: Place, stamp: str | None) -> Iterator[pq.ParquetFile]:
    """Open a Parquet file; translate errors to `ScoringError`."""
    with path.storage.open(path.path, stamp) as raw:
        try:
            # Without these options, Arrow reads a whole row group before its first row.
            with pq.ParquetFile(raw, pre_buffer=False, buffer_size=MIB, page_checksum_verification=True) as file:
                yield file
        except (pa.ArrowException, OSError) as error:
            raise ScoringError(f"{path.text} is not a valid Parquet file: {error}") from error


@dataclass(frozen=True, slots=True)
class _ImageTable:
    """An open file with images.

    Attributes:
        name: Prefix of row ids if there is no column of ids.
        named: Column of ids, or empty.
        kept: Columns copied to the results.
        deleted: Positions of rows that do not count.
    """

    file: Any  # as pq.ParquetFile
    place: Place
    name: str
    image: ImageColumn
    named: str
    kept: Sequence[str]
    deleted: Positions

    def rows(self, group: int, skipped: int, rows: int, before: int) -> Iterator[Row]:
        """Yield the rows of a row group; rows from a damaged page on become errors.

        Arrow reads a column of a row group from its beginning, so rows after a damaged page are unreadable; other row
        groups are not affected.

        Raises:
            ScoringError: The column of ids is damaged, too.
        """
        names = dict.fromkeys([self.image.name, *filter(None, [self.named]), *self.kept])
        done = 0
        try:
            for batch in self._batches(list(names), group, skipped, rows):
                yield from self._batch(batch, before + done)
                done += len(batch)
        except _DAMAGE as error:
            where = f"{self.place.text} is damaged in row group {group}, starting at row {before + done} of the file"
            reason = f"{where}: {' '.join(str(error).split())}"
            yield from self._damaged(group, skipped + done, rows - done, before + done, reason)

    def _batches(self, columns: list[str], group: int, skipped: int, rows: int) -> Iterator[pa.RecordBatch]:
        batches: Any = self.file.iter_batches(_ROWS_AT_A_TIME, row_groups=[group], columns=columns, use_threads=False)
        for batch in batches:
            begin = min(skipped, len(batch))
            taken = batch.slice(begin, rows)
            skipped, rows = skipped - begin, rows - len(taken)
            if len(taken):
                yield taken
            if not rows:
                return

    def _batch(self, batch: pa.RecordBatch, before: int) -> Iterator[Row]:
        batch, positions = _without(self.deleted, batch, before)
        ids = self._ids(batch, positions)
        kept = {column: plain(column_of(batch, column)) for column in self.kept}
        images, folder = column_of(batch, self.image.name), self.place.folder
        for index, name in enumerate(ids):
            yield Row(
                id=name,
                load=partial(_load, self.image, images, index, folder),
                kept={column: values.slice(index, 1) for column, values in kept.items()},
            )

    def _damaged(self, group: int, skipped: int, rows: int, before: int, reason: str) -> Iterator[Row]:
        """Error rows for unreadable rows, with their ids."""
        gone = _between(self.deleted, before, before + rows)
        ids = [f"{self.name}:{number}" for number in np.setdiff1d(np.arange(before, before + rows), gone)]
        if self.named:
            try:
                ids = []
                for batch in self._batches([self.named], group, skipped, rows):
                    ids += self._ids(*_without(self.deleted, batch, before))
                    before += len(batch)
            except _DAMAGE as error:
                raise ScoringError(
                    f"{reason}, including the id column '{self.named}'", hint="copy the file again"
                ) from error
        kept = {name: pa.nulls(1, plain_type(type_of(self.file.schema_arrow, name))) for name in self.kept}
        for name in ids:
            yield Row(id=name, load=partial(refuse_row, reason), kept=kept)

    def _ids(self, batch: pa.RecordBatch, positions: Positions) -> list[str]:
        if self.named:
            return as_ids(column_of(batch, self.named), self.named, self.place.text)
        return [f"{self.name}:{number}" for number in positions.tolist()]


def _load(image: ImageColumn, images: pa.Array, index: int, folder: Place) -> bytes:
    try:
        content, path = image.value(images, index)
    except UnicodeDecodeError as error:
        raise InvalidInput(f"the image path is not UTF-8: {error}") from error
    if content is not None:
        return content
    if path:
        return load_image(folder, path)
    raise InvalidInput("the row has no image")


@dataclass(frozen=True, kw_only=True, slots=True)
class ImageColumn:
    """A column of images.

    Attributes:
        name: Name of the column, or of a struct field.
        is_path: Whether it contains paths.
        is_struct: Whether it contains `{bytes, path}`, as in Hugging Face data sets.
    """

    name: str
    is_path: bool
    is_struct: bool

    def value(self, column: pa.Array, index: int) -> tuple[bytes | None, str | None]:
        """The encoded image of a row, or its path, or neither."""
        value = column[index].as_py()
        if self.is_struct:
            return (value.get(_BYTES), value.get(_PATH)) if value else (None, None)
        return (None, value) if self.is_path else (value, None)


def find_image_column(schema: pa.Schema, columns: Columns, where: str) -> ImageColumn:
    """Find the named column, or the only candidate.

    Raises:
        ScoringError: There is no such column, or more than one.
    """
    columns.check([name for name, _ in _fields(schema)], where)
    name = columns.image
    if not name:
        found = [field.name for field in schema if _is_bytes(plain_type(field.type)) or _is_image_struct(field.type)]
        if len(found) != 1:
            what = f"{len(found)} columns" if found else "no column"
            raise ScoringError(
                f"{where} has {what} of image bytes",
                hint=f"choose a column of bytes or paths with --image-column: {', '.join(schema.names)}",
            )
        name = found[0]
        Columns(image=name).check(schema.names, where)
    kind = type_of(schema, name)
    if _is_image_struct(kind):
        return ImageColumn(name=name, is_path=False, is_struct=True)
    values = plain_type(kind)
    if _is_bytes(values) or _is_text(values):
        return ImageColumn(name=name, is_path=_is_text(values), is_struct=False)
    raise ScoringError(
        f"{where}: column '{name}' of {kind} cannot hold images", hint="expected bytes, text, or {bytes, path}"
    )


def as_ids(column: pa.Array, name: str, where: str) -> list[str]:
    """Convert a column of text or integers to ids.

    Raises:
        ScoringError: The column has another type, or nulls.
    """
    values = plain(column)
    if not (_is_text(values.type) or pa.types.is_integer(values.type)):
        raise ScoringError(
            f"{where}: column '{name}' of {values.type} cannot be the id column", hint="expected text or integers"
        )
    if values.null_count:
        raise ScoringError(f"{where}: column '{name}' is the id column, but has nulls")
    try:
        return list(map(str, values.to_pylist()))
    except UnicodeDecodeError as error:
        raise ScoringError(f"{where}: column '{name}' is the id column, but is not UTF-8: {error}") from error


def type_of(schema: pa.Schema, name: str) -> pa.DataType:
    """Type of a column, or of a struct field such as `image.path`."""
    return next(kind for each, kind in _fields(schema) if each == name)


def column_of(batch: pa.RecordBatch, name: str) -> pa.Array:
    """A column, or a struct field (null if the struct is null)."""
    if name in batch.schema.names:
        return batch.column(name)
    above = next(each for each in batch.schema.names if name.startswith(f"{each}."))
    column = batch.column(above)
    for part in name.removeprefix(f"{above}.").split("."):
        column = column.flatten()[column.type.get_field_index(part)]
    return column


def plain(column: pa.Array) -> pa.Array:
    """Decode a dictionary-encoded column."""
    return column.dictionary_decode() if pa.types.is_dictionary(column.type) else column


def plain_type(kind: pa.DataType) -> pa.DataType:
    """Type without dictionary encoding, whose index width differs between files."""
    return kind.value_type if pa.types.is_dictionary(kind) else kind


def _fields(schema: pa.Schema) -> Iterator[tuple[str, pa.DataType]]:
    """Yield columns, then struct fields with names such as `image.path`."""
    waiting = [(field.name, field.type) for field in schema]
    for name, kind in waiting:  # the list grows meanwhile
        yield name, kind
        if pa.types.is_struct(kind):
            waiting.extend((f"{name}.{inner.name}", inner.type) for inner in kind)


def _is_bytes(kind: pa.DataType) -> bool:
    return bool(pa.types.is_binary(kind) or pa.types.is_large_binary(kind) or pa.types.is_binary_view(kind))


def _is_text(kind: pa.DataType) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind))


def _is_image_struct(kind: pa.DataType) -> bool:
    return bool(pa.types.is_struct(kind) and kind.get_field_index(_BYTES) >= 0 and _is_bytes(kind.field(_BYTES).type))
