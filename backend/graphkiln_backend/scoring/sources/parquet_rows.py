"""The rows of a Parquet file, some at a time, and those of a damaged row group as errors of their own.

Arrow reads a column of a row group from its beginning, so that nothing behind its first damaged page can be reached.
Other columns can, which may name the rows, and so can other row groups.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import repeat
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from graphkiln_backend.graph.errors import InvalidInput
from graphkiln_backend.scoring.errors import ScoringError
from graphkiln_backend.scoring.rows import Row
from graphkiln_backend.scoring.sources.listing import above_of, load_image
from graphkiln_backend.scoring.sources.parquet_columns import (
    ImageColumn,
    as_ids,
    column_of,
    plain,
    plain_type,
    type_of,
)
from graphkiln_backend.scoring.sources.places import Place
from graphkiln_backend.scoring.sources.reader import refuse_row

ROWS_AT_A_TIME = 16
# What Arrow raises for a page that it cannot make sense of. What a file itself cannot do just now is no OSError here:
# see `opened_file`. Memory that is gone is none either: the same rows may fit later.
_DAMAGE = (pa.ArrowInvalid, pa.ArrowNotImplementedError, pa.ArrowSerializationError, OSError)


@dataclass(frozen=True, kw_only=True, slots=True)
class ImageTable:
    """A file whose rows have images.

    Attributes:
        file: Open.
        place: Where it lies.
        name: What its rows are called by, with their number, where no column names them.
        image: The column of images.
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
            skipped: Rows of the first of them that stand before.
            before: Rows of the file that stand before.
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
            except StopIteration:  # fewer than its footer says: whoever counts them tells
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
        group: Its number.
        skipped: Rows of it that stand before.
        rows: How many they are.
        before: Rows of the file that stand before.
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
