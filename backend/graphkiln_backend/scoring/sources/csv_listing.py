"""A CSV or TSV file with a header, one of whose columns names an image in each row. A range is some of its bytes."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import PurePosixPath

import pyarrow as pa

from graphkiln_backend.images.formats import SUFFIXES as SUFFIXES_OF_IMAGES
from graphkiln_backend.scoring.errors import ScoringError
from graphkiln_backend.scoring.rows import Row
from graphkiln_backend.scoring.sources.listing import (
    Block,
    above_of,
    check_addresses,
    find_extents,
    load_image,
    read_blocks,
    read_extent,
)
from graphkiln_backend.scoring.sources.names import checked_text, decode_part, digest, encode_part
from graphkiln_backend.scoring.sources.places import Place, locate
from graphkiln_backend.scoring.sources.reader import REPEATED, Columns
from graphkiln_backend.scoring.sources.repeats import Repeats
from graphkiln_backend.scoring.sources.storage import StoredFile
from graphkiln_backend.scoring.units import InputRange, Unit

KIND = "csv"
SUFFIXES = (".csv", ".tsv")
_SEPARATORS = (";", "\t", "|", ",")  # of fields, in tables whose own is another


@dataclass(frozen=True, slots=True)
class _Table:
    """How a file's records are read.

    Attributes:
        header: Names of its columns.
        image: Position of the image's path.
        id: Position of the row's name.
        delimiter: Between fields.
    """

    header: Sequence[str]
    image: int
    id: int
    delimiter: str

    def parse(self, records: Sequence[bytes], where: str) -> Iterator[list[str]]:
        """The fields of records, blank ones left out.

        Raises:
            ScoringError: One is no record of this table.
        """
        try:
            text = b"\n".join(records).decode()
            for fields in csv.reader(io.StringIO(text, newline=""), delimiter=self.delimiter, strict=True):
                if not _is_blank(fields):
                    yield self._checked(fields, where)
        except (UnicodeDecodeError, csv.Error) as error:
            raise ScoringError(f"{where} is no CSV in UTF-8: {error}") from error

    def _checked(self, fields: list[str], where: str) -> list[str]:
        if len(fields) != len(self.header):
            raise ScoringError(f"{where}: {fields} has {len(fields)} fields, expected {len(self.header)}")
        if not fields[self.id]:
            raise ScoringError(f"{where}: {fields} has no '{self.header[self.id]}', which is its id")
        return fields


class CsvReader:
    """Rows of CSV files. A row's id is its image's path, or what stands in the column of ids.

    Args:
        columns: Which of them are read.
    """

    def __init__(self, columns: Columns) -> None:
        self._columns = columns

    def ranges(self, place: Place, files: Iterator[StoredFile], rows: int) -> Iterator[InputRange]:
        """Runs of rows that end where a row says so."""
        for file in files:
            listing = place.below(file.path)
            table = self._table(self._read_header(listing), listing.text)
            with Repeats() as repeats:
                for extent in find_extents(_noted(listing, table, repeats), rows):
                    part = encode_part(KIND, (list(table.header), extent.offset, extent.size, extent.digest))
                    identity = digest(*table.header, extent.digest)
                    yield InputRange(path=checked_text(listing.text), part=part, identity=identity, rows=extent.rows)
                repeats.check(partial(_ids, listing, table), REPEATED)

    def rows(self, unit: Unit) -> Iterator[Row]:
        """The rows of a range."""
        header, *extent = decode_part(unit.part)
        table = self._table(header, unit.path)
        content = read_extent(unit, *extent)
        above = above_of(locate(unit.path))
        kept = [(name, header.index(name)) for name in self._columns.kept]
        for fields in table.parse([content], unit.path):
            yield Row(
                id=fields[table.id],
                load=partial(load_image, above, fields[table.image]),
                kept={name: pa.array([fields[index]], pa.string()) for name, index in kept},
            )

    def _read_header(self, listing: Place) -> list[str]:
        with listing.storage.open(listing.path) as file:
            first = next(read_blocks(file, listing.text, quoted=True), None)
        try:
            text = first.records[0].decode() if first else ""
            header = next(csv.reader([text], delimiter=_delimiter(listing.text), strict=True), [])
        except (UnicodeDecodeError, csv.Error) as error:
            raise ScoringError(f"{listing.text} is no CSV in UTF-8: {error}") from error
        if _is_blank(header):
            raise ScoringError(f"{listing.text} has no header", hint="its first line names its columns")
        return header

    def _table(self, header: list[str], where: str) -> _Table:
        if len(set(header)) < len(header):
            raise ScoringError(f"{where} has two columns of one name: {', '.join(header)}")
        self._columns.check(header, where)
        if not self._columns.image:
            _check_only_column(header, where)
        image = header.index(self._columns.image or header[0])
        named = header.index(self._columns.id) if self._columns.id else image
        return _Table(header, image, named, _delimiter(where))


def _check_only_column(header: Sequence[str], where: str) -> None:
    """Refuses what is no single column, before each of its rows becomes an error, or the first one is lost."""
    if len(header) != 1:
        raise ScoringError(f"{where} has several columns", hint=f"--image-column: {', '.join(header)}")
    (name,) = header
    if found := [each for each in _SEPARATORS if each in name]:
        hint = "put commas between them, or tabs and call it .tsv"
        message = f"{where} has one column, {name!r}: its fields seem to stand between {found[0]!r}"
        raise ScoringError(message, hint=hint)
    if PurePosixPath(name).suffix.lower() in SUFFIXES_OF_IMAGES:
        raise ScoringError(
            f"{where} has no header: its first line names an image, {name}",
            hint="put the name of the column above it; paths alone, one a line, are a .txt",
        )


def _is_blank(fields: list[str]) -> bool:
    return not fields or (len(fields) == 1 and fields[0].isspace())


def _delimiter(name: str) -> str:
    return "\t" if name.lower().endswith(".tsv") else ","


def _noted(listing: Place, table: _Table, repeats: Repeats) -> Iterator[Block]:
    """The records below the header, their ids noted."""
    for block in _records(listing):
        rows = list(table.parse(block.records, listing.text))
        if len(rows) != sum(bool(record.strip()) for record in block.records):
            raise ScoringError(
                f"{listing.text} mixes kinds of line ends, or has a double quote within a field that is not quoted",
                hint='\\n and \\r\\n are read, \\r alone is not; a quote is written as "a ""b"" c"',
            )
        repeats.add([fields[table.id] for fields in rows])
        check_addresses("\n".join(fields[table.image] for fields in rows).encode(), listing.text)
        yield block


def _records(listing: Place) -> Iterator[Block]:
    with listing.storage.open(listing.path) as file:
        is_first = True
        for block in read_blocks(file, listing.text, quoted=True):
            if not is_first:
                yield block
            elif len(block.records) > 1:
                end = block.ends[0]
                yield Block(block.offset + end, block.content[end:], block.records[1:])
            is_first = False


def _ids(listing: Place, table: _Table) -> Iterator[str]:
    for block in _records(listing):
        for fields in table.parse(block.records, listing.text):
            yield fields[table.id]
