"""Text files that name one image per line: listings of paths, and tables with a header (CSV, TSV).

A range is a part of the file, identified by its digest: the images are not accessed before they are read. Paths are
relative to the file's folder.
"""

from __future__ import annotations

import csv
import hashlib
import io
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from pathlib import PurePosixPath
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from graphkiln_backend.graph.files import MIB, format_size
from graphkiln_backend.images.formats import SUFFIXES as SUFFIXES_OF_IMAGES
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
    find_ends,
)
from graphkiln_backend.scoring.sources.places import READABLE, Place, load_image, locate
from graphkiln_backend.scoring.sources.storage import StoredFile

KIND, CSV_KIND = "lines", "csv"
SUFFIXES, CSV_SUFFIXES = (".txt", ".lst", ".list"), (".csv", ".tsv")
_ADDRESS = re.compile(rb"^\s*(?!s3://|gs://|file://)[a-zA-Z][a-zA-Z0-9+.-]*://.*", re.M)
_BLOCK = 4 * MIB
_LONGEST = 64 * MIB
_MARK = b"\xef\xbb\xbf"
_QUOTE = b'"'
_SEPARATORS = (";", "\t", "|", ",")  # field separators suggested by the error for a wrong one


class ListingReader:
    """Paths, one per line. A row's id is its line.

    Raises:
        ScoringError: Columns are requested.
    """

    def __init__(self, columns: Columns) -> None:
        columns.refuse("listings of one path per line")

    def ranges(self, place: Place, files: Iterator[StoredFile], rows: int) -> Iterator[InputRange]:
        """Yield content-defined chunks of lines."""
        for file in files:
            listing = place.below(file.path)
            for extent in _planned(partial(read_blocks, listing), partial(_checked_lines, listing.text), rows):
                part = encode_part(KIND, (extent.offset, extent.size, extent.digest))
                yield InputRange(path=checked_text(listing.text), part=part, identity=extent.digest, rows=extent.rows)

    def rows(self, unit: Unit) -> Iterator[Row]:
        """Yield the lines of a range."""
        content = _read_extent(unit, *decode_part(unit.part))
        folder = locate(unit.path).folder
        for line in content.split(b"\n"):
            if text := line.strip().decode("utf-8", "surrogateescape"):
                yield Row(id=as_id(text), load=partial(load_image, folder, text))


def _checked_lines(where: str, block: Block) -> list[bytes]:
    """Non-blank lines of a block."""
    check_addresses(block.content, where)
    lines = [text for record in block.records if (text := record.strip())]
    if b"\r" in block.content and any(b"\r" in line for line in lines):  # otherwise the whole file would be one row
        hint = "use \\n or \\r\\n: tr '\\r' '\\n' converts the file"
        raise ScoringError(f"{where} has a \\r that is not followed by \\n", hint=hint)
    return lines


class CsvReader:
    """Rows of CSV files with a column of image paths. A row's id is the path, or the column of ids."""

    def __init__(self, columns: Columns) -> None:
        self._columns = columns

    def ranges(self, place: Place, files: Iterator[StoredFile], rows: int) -> Iterator[InputRange]:
        """Yield content-defined chunks of rows."""
        for file in files:
            listing = place.below(file.path)
            table = self._table(_read_header(listing), listing.text)
            for extent in _planned(partial(_below_header, listing), table.ids, rows):
                part = encode_part(CSV_KIND, (list(table.header), extent.offset, extent.size, extent.digest))
                identity = digest(*table.header, extent.digest)
                yield InputRange(path=checked_text(listing.text), part=part, identity=identity, rows=extent.rows)

    def rows(self, unit: Unit) -> Iterator[Row]:
        """Yield the rows of a range."""
        header, *extent = decode_part(unit.part)
        table = self._table(header, unit.path)
        folder = locate(unit.path).folder
        kept = [(name, header.index(name)) for name in self._columns.kept]
        for fields in table.parse([_read_extent(unit, *extent)]):
            yield Row(
                id=fields[table.id],
                load=partial(load_image, folder, fields[table.image]),
                kept={name: pa.array([fields[index]], pa.string()) for name, index in kept},
            )

    def _table(self, header: list[str], where: str) -> _Table:
        if len(set(header)) < len(header):
            raise ScoringError(f"{where} has duplicate column names: {', '.join(header)}")
        self._columns.check(header, where)
        if not self._columns.image:
            _check_only_column(header, where)
        image = header.index(self._columns.image or header[0])
        return _Table(where, header, image, header.index(self._columns.id) if self._columns.id else image)


@dataclass(frozen=True, slots=True)
class _Table:
    """Columns of a CSV file, and the positions of image path and row id."""

    where: str
    header: Sequence[str]
    image: int
    id: int

    def parse(self, records: Sequence[bytes]) -> Iterator[list[str]]:
        """Parse records; blank ones are skipped.

        Raises:
            ScoringError: A record does not match the table.
        """
        try:
            text = io.StringIO(b"\n".join(records).decode(), newline="")
            for fields in csv.reader(text, delimiter=_delimiter(self.where), strict=True):
                if not _is_blank(fields):
                    yield self._checked(fields)
        except (UnicodeDecodeError, csv.Error) as error:
            raise ScoringError(f"{self.where} is not a CSV file in UTF-8: {error}") from error

    def ids(self, block: Block) -> list[str]:
        """Ids of a block, after a check of its addresses."""
        rows = list(self.parse(block.records))
        if len(rows) != sum(bool(record.strip()) for record in block.records):
            raise ScoringError(
                f"{self.where} mixes line endings, or has a double quote inside an unquoted field",
                hint='use \\n or \\r\\n; write a quote as "a ""b"" c"',
            )
        check_addresses("\n".join(fields[self.image] for fields in rows).encode(), self.where)
        return [fields[self.id] for fields in rows]

    def _checked(self, fields: list[str]) -> list[str]:
        if len(fields) != len(self.header):
            raise ScoringError(f"{self.where}: {fields} has {len(fields)} fields, expected {len(self.header)}")
        if not fields[self.id]:
            raise ScoringError(f"{self.where}: {fields} has an empty id column, '{self.header[self.id]}'")
        return fields


def _read_header(listing: Place) -> list[str]:
    first = next(read_blocks(listing, quoted=True), None)
    try:
        text = first.records[0].decode() if first else ""
        header = next(csv.reader([text], delimiter=_delimiter(listing.text), strict=True), [])
    except (UnicodeDecodeError, csv.Error) as error:
        raise ScoringError(f"{listing.text} is not a CSV file in UTF-8: {error}") from error
    if _is_blank(header):
        raise ScoringError(f"{listing.text} has no header", hint="the first line must name the columns")
    return header


def _below_header(listing: Place) -> Iterator[Block]:
    for number, block in enumerate(read_blocks(listing, quoted=True)):
        if number:
            yield block
        elif len(block.records) > 1:
            end = block.ends[0]
            yield Block(block.offset + end, block.content[end:], block.records[1:])


def _check_only_column(header: Sequence[str], where: str) -> None:
    """Refuse a table without header, or with other separators, instead of an error for each row."""
    if len(header) != 1:
        raise ScoringError(f"{where} has several columns", hint=f"--image-column: {', '.join(header)}")
    (name,) = header
    if found := [each for each in _SEPARATORS if each in name]:
        raise ScoringError(
            f"{where} has one column, {name!r}: the fields appear to be separated by {found[0]!r}",
            hint="separate fields with commas, or with tabs in a .tsv file",
        )
    if PurePosixPath(name).suffix.lower() in SUFFIXES_OF_IMAGES:
        raise ScoringError(
            f"{where} has no header: the first line is an image, {name}",
            hint="add a header line, or rename the file to .txt for one path per line",
        )


def _is_blank(fields: list[str]) -> bool:
    return not fields or (len(fields) == 1 and fields[0].isspace())


def _delimiter(name: str) -> str:
    return "\t" if name.lower().endswith(".tsv") else ","


def check_addresses(content: bytes, where: str) -> None:
    """Refuse unsupported addresses before the run starts.

    Raises:
        ScoringError: An address is unsupported.
    """
    if b"://" in content and (found := _ADDRESS.search(content)):
        text = as_id(found.group().strip().decode("utf-8", "surrogateescape"))
        raise ScoringError(f"{where}: '{text}' cannot be read", hint=READABLE)


class Extent(NamedTuple):
    """A range of whole records: offset, size, SHA-256, and number of non-blank records."""

    offset: int
    size: int
    digest: str
    rows: int


def _planned(
    blocks: Callable[[], Iterator[Block]], ids_of: Callable[[Block], list[bytes] | list[str]], rows: int
) -> Iterator[Extent]:
    """Yield the extents of a listing; ids must be unique."""
    with RowHashes() as seen:

        def noted() -> Iterator[Block]:
            for block in blocks():
                seen.add(ids_of(block))
                yield block

        yield from find_extents(noted(), rows)
        seen.refuse_repeated(lambda: (one for block in blocks() for one in ids_of(block)), REPEATED)


def find_extents(blocks: Iterator[Block], rows: int) -> Iterator[Extent]:
    """Divide a listing into content-defined extents of `rows` records on average."""
    offset = size = count = 0
    hashed = hashlib.sha256()
    for block in blocks:
        if not size:
            offset = block.offset
        begin, counted = 0, 0
        ends = block.ends
        before: list[int] = np.cumsum([bool(record.strip()) for record in block.records]).tolist()  # non-blank
        for last in np.flatnonzero(find_ends(block.records, rows)).tolist():
            if count + before[last] - counted == 0:  # only blank lines
                continue
            content = block.content[begin : ends[last]]
            hashed.update(content)
            yield Extent(offset, size + len(content), hashed.hexdigest(), count + before[last] - counted)
            begin, counted, count, size, hashed = ends[last], before[last], 0, 0, hashlib.sha256()
            offset = block.offset + begin
        hashed.update(block.content[begin:])
        size, count = size + len(block.content) - begin, count + before[-1] - counted
    if count:
        yield Extent(offset, size, hashed.hexdigest(), count)


def _read_extent(unit: Unit, offset: int, size: int, expected: str) -> bytes:
    place = locate(unit.path)
    with place.storage.open(place.path) as file:
        file.seek(offset)
        content = file.read(size)
    if hashlib.sha256(content).hexdigest() != expected:
        raise InputChanged(f"{unit.path} has changed between bytes {offset} and {offset + size} since it was planned")
    return content


@dataclass(frozen=True, slots=True)
class Block:
    """Consecutive records.

    Attributes:
        offset: Offset of the first byte in the file.
        content: All bytes, including line ends.
        records: Records without their last line end; empty for blank lines.
    """

    offset: int
    content: bytes
    records: list[bytes]

    @property
    def ends(self) -> list[int]:
        """Offset of the end of each record in the content, after its line end."""
        ends = list(accumulate(len(record) + 1 for record in self.records))
        ends[-1] = len(self.content)
        return ends


def read_blocks(listing: Place, *, quoted: bool = False) -> Iterator[Block]:
    """Read a text file as records, in blocks.

    Args:
        listing: The file.
        quoted: Whether line ends between double quotes belong to the record, as in CSV.

    Raises:
        ScoringError: It is not text, or a record never ends.
    """
    name = listing.text
    with listing.storage.open(listing.path) as file:
        rest = file.read(len(_MARK))
        offset, rest = (len(_MARK), b"") if rest == _MARK else (0, rest)
        while piece := file.read(_BLOCK):
            rest += piece
            end = _last_end(rest, quoted)
            if end:
                yield _block(offset, rest[:end], name, quoted)
                offset, rest = offset + end, rest[end:]
            elif len(rest) > _LONGEST:
                what = "line, or a quotation without an end," if quoted else "line"
                raise ScoringError(f"{name} has a {what} of more than {format_size(_LONGEST)} at byte {offset}")
    if rest:
        if quoted and rest.count(_QUOTE) % 2:
            raise ScoringError(f"{name}: a quotation that begins after byte {offset} never ends")
        yield _block(offset, rest, name, quoted)


def _block(offset: int, content: bytes, name: str, quoted: bool) -> Block:
    if b"\0" in content:
        raise ScoringError(f"{name} holds null bytes", hint="a listing is UTF-8 text with one line per image")
    lines = content.removesuffix(b"\n").split(b"\n")
    return Block(offset, content, list(_joined(lines)) if quoted and _QUOTE in content else lines)


def _last_end(content: bytes, quoted: bool) -> int:
    """End of the last complete record."""
    end = content.rfind(b"\n") + 1
    quotes = content.count(_QUOTE, 0, end) if quoted else 0
    while end and quotes % 2:
        above = content.rfind(b"\n", 0, end - 1) + 1
        quotes -= content.count(_QUOTE, above, end)
        end = above
    return end


def _joined(lines: list[bytes]) -> Iterator[bytes]:
    """Join lines inside of quotations."""
    open_lines: list[bytes] = []
    is_open = False
    for line in lines:
        open_lines.append(line)
        is_open ^= bool(line.count(_QUOTE) % 2)
        if not is_open:
            yield b"\n".join(open_lines)
            open_lines = []
