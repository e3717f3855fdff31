"""A listing: a text file with the path or address of an image in each line. A range is some of its bytes.

Nothing is asked of the images themselves before they are read: ranges are identified by a digest of their lines.
Relative paths start at the listing's folder.
"""

from __future__ import annotations

import csv
import hashlib
import io
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from pathlib import PurePosixPath
from typing import BinaryIO

import numpy as np
import pyarrow as pa

from graphkiln_backend.graph.files import MIB, format_size
from graphkiln_backend.images.formats import SUFFIXES as SUFFIXES_OF_IMAGES
from graphkiln_backend.scoring.errors import InputChanged, ScoringError
from graphkiln_backend.scoring.row_hashes import Repeats
from graphkiln_backend.scoring.sources.base import REPEATED, Columns
from graphkiln_backend.scoring.sources.names import as_id, checked_text, decode_part, digest, encode_part, find_ends
from graphkiln_backend.scoring.sources.places import READABLE, Place, StoredFile, locate
from graphkiln_backend.scoring.units import InputRange, Row, Unit

# A text file as records, in blocks, with their offsets.

_BLOCK = 4 * MIB
_LONGEST = 64 * MIB
_MARK = b"\xef\xbb\xbf"
_QUOTE = b'"'


@dataclass(frozen=True, slots=True)
class Block:
    """Some records that follow each other.

    Attributes:
        offset: Offset of the first byte in the file.
        content: All bytes, line ends included.
        records: The records without their last line end; an empty one for a blank line.
    """

    offset: int
    content: bytes
    records: list[bytes]

    @property
    def ends(self) -> list[int]:
        """Offsets behind each record within the content, its line end included."""
        ends = list(accumulate(len(record) + 1 for record in self.records))
        ends[-1] = len(self.content)
        return ends


def read_blocks(file: BinaryIO, name: str, *, quoted: bool = False) -> Iterator[Block]:
    """Read a file to its end.

    Args:
        file: It, at its beginning.
        name: What to call it.
        quoted: Whether a line end between double quotes belongs to the record, as in CSV.

    Raises:
        ScoringError: It is no text, or a record never ends.
    """
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
        raise ScoringError(f"{name} holds null bytes", hint="a listing is UTF-8 text, a line for each image")
    lines = content.removesuffix(b"\n").split(b"\n")
    return Block(offset, content, list(_joined(lines)) if quoted and _QUOTE in content else lines)


def _last_end(content: bytes, quoted: bool) -> int:
    """Behind the last record that is there as a whole."""
    end = content.rfind(b"\n") + 1
    quotes = content.count(_QUOTE, 0, end) if quoted else 0
    while end and quotes % 2:
        above = content.rfind(b"\n", 0, end - 1) + 1
        quotes -= content.count(_QUOTE, above, end)
        end = above
    return end


def _joined(lines: list[bytes]) -> Iterator[bytes]:
    """Lines put together while a quotation is open."""
    open_lines: list[bytes] = []
    is_open = False
    for line in lines:
        open_lines.append(line)
        is_open ^= bool(line.count(_QUOTE) % 2)
        if not is_open:
            yield b"\n".join(open_lines)
            open_lines = []


KIND = "lines"
SUFFIXES = (".txt", ".lst", ".list")
_ADDRESS = re.compile(rb"^\s*(?!s3://|gs://|file://)[a-zA-Z][a-zA-Z0-9+.-]*://.*", re.M)


@dataclass(frozen=True, slots=True)
class Extent:
    """Some bytes of a listing: whole records.

    Attributes:
        offset: Offset of the first byte.
        size: In bytes.
        digest: SHA-256 of the bytes.
        rows: Records that are not blank.
    """

    offset: int
    size: int
    digest: str
    rows: int


class ListingReader:
    """Paths, one a line. A row's id is its line.

    Args:
        columns: None, as there are none.

    Raises:
        ScoringError: Columns are requested.
    """

    def __init__(self, columns: Columns) -> None:
        columns.refuse("listings of one path a line")

    def ranges(self, place: Place, files: Iterator[StoredFile], rows: int) -> Iterator[InputRange]:
        """Runs of lines that end where a line says so."""
        for file in files:
            listing = place.below(file.path)
            with Repeats() as repeats:
                for extent in find_extents(_noted(listing, repeats), rows):
                    part = encode_part(KIND, (extent.offset, extent.size, extent.digest))
                    yield InputRange(
                        path=checked_text(listing.text), part=part, identity=extent.digest, rows=extent.rows
                    )
                repeats.check(partial(_ids, listing), REPEATED)

    def rows(self, unit: Unit) -> Iterator[Row]:
        """The lines of a range."""
        content = read_extent(unit, *decode_part(unit.part))
        above = above_of(locate(unit.path))
        for line in content.split(b"\n"):
            if text := line.strip().decode("utf-8", "surrogateescape"):
                yield Row(id=as_id(text), load=partial(load_image, above, text))


def find_extents(blocks: Iterator[Block], rows: int) -> Iterator[Extent]:
    """Cut a listing where a record says so.

    Args:
        blocks: The listing.
        rows: Records that an extent has on average.
    """
    offset = size = count = 0
    hashed = hashlib.sha256()
    for block in blocks:
        if not size:
            offset = block.offset
        begin, counted = 0, 0
        ends, before = block.ends, _count(block.records)
        for last in np.flatnonzero(find_ends(block.records, rows)).tolist():
            if count + before[last] - counted == 0:  # blank lines alone
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


def _count(records: Sequence[bytes]) -> list[int]:
    """Count the records up to each that are not blank."""
    counted: list[int] = np.cumsum([bool(record.strip()) for record in records]).tolist()
    return counted


def read_extent(unit: Unit, offset: int, size: int, expected: str) -> bytes:
    """The bytes of an extent.

    Raises:
        InputChanged: They are others now.
    """
    place = locate(unit.path)
    with place.storage.open(place.path) as file:
        file.seek(offset)
        content = file.read(size)
    if hashlib.sha256(content).hexdigest() != expected:
        raise InputChanged(f"{unit.path} has changed between bytes {offset} and {offset + size} since it was planned")
    return content


def above_of(place: Place) -> Place:
    """The folder of a file."""
    return Place(place.storage, place.path.rpartition("/")[0], place.text.rpartition("/")[0])


def load_image(folder: Place, text: str) -> bytes:
    """Read an image that something names.

    Args:
        folder: Start of relative paths.
        text: A path, or an address.

    Raises:
        SourceUnavailable: It cannot be read just now.
        GraphkilnError: It can never be read.
        OSError: Likewise.
    """
    place = locate(text) if text.startswith("/") or "://" in text else folder.below(text)
    return place.storage.read(place.path, None)


def check_addresses(content: bytes, where: str) -> None:
    """Refuse addresses that no row could be read from, before anything is scored.

    Raises:
        ScoringError: There is one.
    """
    if b"://" in content and (found := _ADDRESS.search(content)):
        text = as_id(found.group().strip().decode("utf-8", "surrogateescape"))
        raise ScoringError(f"{where}: '{text}' cannot be read", hint=READABLE)


def _check_line_ends(lines: Sequence[bytes], where: str) -> None:
    """Refuse line ends of carriage returns alone: the whole file would be one row."""
    if any(b"\r" in line for line in lines):
        hint = "\\n and \\r\\n are read: tr '\\r' '\\n' mends it"
        raise ScoringError(f"{where} has line ends of \\r alone, or a name with one", hint=hint)


def _noted(listing: Place, repeats: Repeats) -> Iterator[Block]:
    with listing.storage.open(listing.path) as file:
        for block in read_blocks(file, listing.text):
            check_addresses(block.content, listing.text)
            lines = _stripped(block)
            if b"\r" in block.content:
                _check_line_ends(lines, listing.text)
            repeats.add(lines)
            yield block


def _ids(listing: Place) -> Iterator[bytes]:
    with listing.storage.open(listing.path) as file:
        for block in read_blocks(file, listing.text):
            yield from _stripped(block)


def _stripped(block: Block) -> list[bytes]:
    return [text for record in block.records if (text := record.strip())]


# A CSV or TSV file with a header, one of whose columns names an image in each row. A range is some of its bytes.

CSV_KIND = "csv"
CSV_SUFFIXES = (".csv", ".tsv")
_SEPARATORS = (";", "\t", "|", ",")  # of fields, in tables whose own is another


@dataclass(frozen=True, slots=True)
class _Table:
    """The columns of a file and their separator.

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
    """Rows of CSV files. A row's id is its image's path, or the value of the column of ids.

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
                for extent in find_extents(_noted_table(listing, table, repeats), rows):
                    part = encode_part(CSV_KIND, (list(table.header), extent.offset, extent.size, extent.digest))
                    identity = digest(*table.header, extent.digest)
                    yield InputRange(path=checked_text(listing.text), part=part, identity=identity, rows=extent.rows)
                repeats.check(partial(_table_ids, listing, table), REPEATED)

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
    """Refuse what is no single column, before each of its rows becomes an error, or the first one is lost."""
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


def _noted_table(listing: Place, table: _Table, repeats: Repeats) -> Iterator[Block]:
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


def _table_ids(listing: Place, table: _Table) -> Iterator[str]:
    for block in _records(listing):
        for fields in table.parse(block.records, listing.text):
            yield fields[table.id]
