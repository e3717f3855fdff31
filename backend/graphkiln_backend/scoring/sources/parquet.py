"""Parquet files whose rows hold images, or their paths. A range is some row groups, or some rows of a large one."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from itertools import repeat
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from graphkiln_backend.graph.errors import InvalidInput
from graphkiln_backend.graph.files import MIB
from graphkiln_backend.scoring.errors import InputChanged, ScoringError
from graphkiln_backend.scoring.row_hashes import Repeats
from graphkiln_backend.scoring.sources.base import REPEATED, Columns, map_ahead, refuse_row
from graphkiln_backend.scoring.sources.listing import above_of, check_addresses, load_image
from graphkiln_backend.scoring.sources.names import as_id, checked_text, decode_part, digest, encode_part
from graphkiln_backend.scoring.sources.places import Place, StoredFile, locate
from graphkiln_backend.scoring.units import InputRange, Row, Unit

# The rows of a Parquet file, some at a time, and those of a damaged row group as errors of their own.
#
# Arrow reads a column of a row group from its beginning, so that nothing behind its first damaged page can be reached.
# Other columns can, which may name the rows, and so can other row groups.

ROWS_AT_A_TIME = 16
# Errors of Arrow for a damaged page. An outage of the file's storage is no OSError here:
# see `OpenedFile`. Exhausted memory is no damage either: the same rows may fit later.
_DAMAGE = (pa.ArrowInvalid, pa.ArrowNotImplementedError, pa.ArrowSerializationError, OSError)


@dataclass(frozen=True, kw_only=True, slots=True)
class ImageTable:
    """A file whose rows have images.

    Attributes:
        file: Open.
        name: What its rows are called by, with their number, where no column names them.
        named: The column of ids; empty where there is none.
        kept: Columns that are carried along.
    """

    file: pq.ParquetFile
    place: Place
    name: str
    image: ImageColumn
    named: str
    kept: Sequence[str]

    def rows(self, groups: range, skipped: int, before: int, rows: int) -> Iterator[Row]:
        """Rows that follow each other.

        Args:
            groups: Row groups that hold them.
            skipped: Rows to skip in the first of them.
            before: Rows of the file before them.
            rows: How many are read.

        Raises:
            ScoringError: Some are damaged, and so is the column that names them.
        """
        for group in groups:
            taken = min(rows, self.file.metadata.row_group(group).num_rows - skipped)
            yield from self._group(_Stretch(group, skipped, taken, before), ROWS_AT_A_TIME)
            skipped, before, rows = 0, before + taken, rows - taken

    def _group(self, stretch: _Stretch, rows: int) -> Iterator[Row]:
        """Rows of a row group, some at a time; where these cannot be read, one by one up to the one that cannot."""
        names = dict.fromkeys([self.image.name, *filter(None, [self.named]), *self.kept])
        batches = _read_batches(self.file, list(names), stretch, rows)
        while stretch.rows:
            try:
                batch = next(batches)
            except StopIteration:  # fewer than its footer says, which the worker notices
                return
            except _DAMAGE as error:
                yield from self._group(stretch, 1) if rows > 1 else self._damaged(stretch, error)
                return
            yield from self._batch(batch, stretch.before)
            stretch = stretch.behind(len(batch))

    def _batch(self, batch: pa.RecordBatch, before: int) -> Iterator[Row]:
        ids = as_ids(column_of(batch, self.named), self.named, self.place.text) if self.named else None
        kept = {column: plain(column_of(batch, column)) for column in self.kept}
        images, folder = column_of(batch, self.image.name), above_of(self.place)
        for index in range(len(batch)):
            yield Row(
                id=ids[index] if ids else self._number(before + index),
                load=partial(_load, self.image, images, index, folder),
                kept={column: values.slice(index, 1) for column, values in kept.items()},
            )

    def _damaged(self, stretch: _Stretch, error: Exception) -> Iterator[Row]:
        """Rows of which some column cannot be read, with what can."""
        reason = f"{self.place.text} is damaged in row group {stretch.group}, from row {stretch.before} of the file on"
        refuse = partial(refuse_row, f"{reason}: {' '.join(str(error).split())}")
        kept = {column: self._salvaged(column, stretch) for column in self.kept}
        for row_id in self._ids(stretch, reason):
            yield Row(id=row_id, load=refuse, kept={column: next(values) for column, values in kept.items()})

    def _ids(self, stretch: _Stretch, reason: str) -> Iterator[str]:
        if not self.named:
            yield from map(self._number, range(stretch.before, stretch.before + stretch.rows))
            return
        for value in self._salvaged(self.named, stretch):
            if value.null_count:
                raise ScoringError(f"{reason}, where column '{self.named}' names its rows", hint="copy the file again")
            yield from as_ids(value, self.named, self.place.text)

    def _salvaged(self, name: str, stretch: _Stretch) -> Iterator[pa.Array]:
        """A column's rows as arrays of one element; null from where it cannot be read on."""
        left = stretch.rows
        with suppress(*_DAMAGE):  # each of these rows says so
            for batch in _read_batches(self.file, [name], stretch, 1):
                values = plain(column_of(batch, name))
                left -= len(values)
                yield from (values.slice(index, 1) for index in range(len(values)))
        nothing = pa.nulls(1, plain_type(type_of(self.file.schema_arrow, name)))
        yield from repeat(nothing, left)

    def _number(self, number: int) -> str:
        return f"{self.name}:{number}"


@dataclass(frozen=True, slots=True)
class _Stretch:
    """Rows of a row group.

    Attributes:
        skipped: Rows of it before them.
        before: Rows of the file before them.
    """

    group: int
    skipped: int
    rows: int
    before: int

    def behind(self, rows: int) -> _Stretch:
        """Without the first of them."""
        return _Stretch(self.group, self.skipped + rows, self.rows - rows, self.before + rows)


def _read_batches(file: pq.ParquetFile, columns: list[str], stretch: _Stretch, size: int) -> Iterator[pa.RecordBatch]:
    """Rows of a row group in batches of a size."""
    skipped, rows = stretch.skipped, stretch.rows
    batches: Any = file.iter_batches(size, row_groups=[stretch.group], columns=columns, use_threads=False)
    for batch in batches:
        begin = min(skipped, len(batch))
        taken = batch.slice(begin, rows)
        skipped, rows = skipped - begin, rows - len(taken)
        if len(taken):
            yield taken
        if not rows:
            return


def _load(image: ImageColumn, images: pa.Array, index: int, folder: Place) -> bytes:
    try:
        content, path = image.value(images, index)
    except UnicodeDecodeError as error:
        raise InvalidInput(f"the path of its image is no UTF-8: {error}") from error
    if content is not None:
        return content
    if path:
        return load_image(folder, path)
    raise InvalidInput("the row has no image")


# The column of images, and what it holds.

_BYTES, _PATH = "bytes", "path"


@dataclass(frozen=True, kw_only=True, slots=True)
class ImageColumn:
    """A column of images.

    Attributes:
        name: Name of the column, or of a field in a struct.
        is_path: Whether it holds nothing but paths.
        is_struct: Whether it holds `{bytes, path}`, as data sets of Hugging Face do.
    """

    name: str
    is_path: bool
    is_struct: bool

    def value(self, column: pa.Array, index: int) -> tuple[bytes | None, str | None]:
        """The encoded image of a row, or its path; neither where the row has none."""
        value = column[index].as_py()
        if self.is_struct:
            return (value.get(_BYTES), value.get(_PATH)) if value else (None, None)
        return (None, value) if self.is_path else (value, None)


def find_image_column(schema: pa.Schema, columns: Columns, where: str) -> ImageColumn:
    """The column that is named, or the only one that can be meant.

    Raises:
        ScoringError: There is no such column, or more than one.
    """
    columns.check([name for name, _ in _fields(schema)], where)
    if columns.image:
        return _describe(columns.image, type_of(schema, columns.image), where)
    found = [field for field in schema if _is_bytes(plain_type(field.type)) or _is_image_struct(field.type)]
    if len(found) != 1:
        what = f"{len(found)} columns" if found else "no column"
        raise ScoringError(
            f"{where} has {what} of image bytes", hint=f"--image-column with bytes or paths: {', '.join(schema.names)}"
        )
    Columns(image=found[0].name).check(schema.names, where)
    return _describe(found[0].name, found[0].type, where)


def as_ids(column: pa.Array, name: str, where: str) -> list[str]:
    """The ids in a column of text or integers.

    Raises:
        ScoringError: It holds anything else, or nothing in some row.
    """
    values = plain(column)
    if not (_is_text(values.type) or pa.types.is_integer(values.type)):
        raise ScoringError(f"{where}: column '{name}' of {values.type} cannot name rows", hint="text and integers can")
    if values.null_count:
        raise ScoringError(f"{where}: column '{name}' names rows, but is empty in some")
    try:
        return list(map(str, values.to_pylist()))
    except UnicodeDecodeError as error:
        raise ScoringError(f"{where}: column '{name}' names rows, and is no UTF-8: {error}") from error


def type_of(schema: pa.Schema, name: str) -> pa.DataType:
    """The type of a column, or of a field in a struct: `image.path`."""
    return next(kind for each, kind in _fields(schema) if each == name)


def column_of(batch: pa.RecordBatch, name: str) -> pa.Array:
    """A column, or a field in a struct; null where the struct is."""
    if name in batch.schema.names:
        return batch.column(name)
    above = next(each for each in batch.schema.names if name.startswith(f"{each}."))
    column = batch.column(above)
    for part in name.removeprefix(f"{above}.").split("."):
        column = column.flatten()[column.type.get_field_index(part)]
    return column


def plain(column: pa.Array) -> pa.Array:
    """Decode a dictionary-encoded column, as categories have."""
    return column.dictionary_decode() if pa.types.is_dictionary(column.type) else column


def plain_type(kind: pa.DataType) -> pa.DataType:
    """The type of such a column. How wide a dictionary's numbers are differs from file to file."""
    return kind.value_type if pa.types.is_dictionary(kind) else kind


def _describe(name: str, kind: pa.DataType, where: str) -> ImageColumn:
    if _is_image_struct(kind):
        return ImageColumn(name=name, is_path=False, is_struct=True)
    values = plain_type(kind)
    if _is_bytes(values) or _is_text(values):
        return ImageColumn(name=name, is_path=_is_text(values), is_struct=False)
    raise ScoringError(f"{where}: column '{name}' of {kind} holds no images", hint="bytes, text, {bytes, path}")


def _fields(schema: pa.Schema) -> Iterator[tuple[str, pa.DataType]]:
    """The columns, then fields in structs, by names such as `image.path`."""
    waiting = deque((field.name, field.type) for field in schema)
    while waiting:
        name, kind = waiting.popleft()
        yield name, kind
        if pa.types.is_struct(kind):
            waiting.extend((f"{name}.{inner.name}", inner.type) for inner in kind)


def _is_bytes(kind: pa.DataType) -> bool:
    return bool(pa.types.is_binary(kind) or pa.types.is_large_binary(kind) or pa.types.is_binary_view(kind))


def _is_text(kind: pa.DataType) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind))


def _is_image_struct(kind: pa.DataType) -> bool:
    return bool(pa.types.is_struct(kind) and kind.get_field_index(_BYTES) >= 0 and _is_bytes(kind.field(_BYTES).type))


KIND = "parquet"
_IDS_AT_A_TIME = 1 << 16
# Pieces of a row group of images: reading the last one reads all before it, which this bounds.
_MOST_PIECES = 16
_TAIL = 1 << 16


@dataclass(frozen=True, kw_only=True, slots=True)
class _Extent:
    """A range of a file.

    Attributes:
        first: Its first row group.
        last: Its last row group.
        skipped: Rows of the first row group that do not belong to it.
        before: Rows of the file before it.
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
    """A file as it is planned: its columns and row groups."""

    file: StoredFile
    digest: str
    image: ImageColumn
    kept: Mapping[str, pa.DataType]
    groups: list[tuple[int, int]]


class ParquetReader:
    """Rows of Parquet files: images as bytes, as `{bytes, path}`, or by their paths, relative to the file's folder.

    A row's id is the value of the column of ids; else the path, where images are named by one; else
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
    """Refuse files whose kept columns differ: the answers could not be read as one table."""
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
    """Open a Parquet file; its errors become `ScoringError`."""
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
