"""A listing: a text file with the path or address of an image in each line. A range is some of its bytes.

Nothing is asked of the images themselves before they are read: what tells ranges apart is a digest of their lines.
Relative paths stand below the listing's own folder.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import BinaryIO

import numpy as np

from graphkiln_backend.graph.files import MIB, format_size
from graphkiln_backend.scoring.errors import InputChanged, ScoringError
from graphkiln_backend.scoring.rows import Row
from graphkiln_backend.scoring.sources.names import as_id, checked_text, decode_part, encode_part, find_ends
from graphkiln_backend.scoring.sources.places import READABLE, Place, locate
from graphkiln_backend.scoring.sources.reader import REPEATED, Columns
from graphkiln_backend.scoring.sources.repeats import Repeats
from graphkiln_backend.scoring.sources.storage import StoredFile
from graphkiln_backend.scoring.units import InputRange, Unit

# A text file as records, in blocks, with the bytes that each stands in.

_BLOCK = 4 * MIB
_LONGEST = 64 * MIB
_MARK = b"\xef\xbb\xbf"
_QUOTE = b'"'


@dataclass(frozen=True, slots=True)
class Block:
    """Some records that follow each other.

    Attributes:
        offset: Of the first byte in the file.
        content: All bytes, line ends included.
        records: The records without their last line end; an empty one for a blank line.
    """

    offset: int
    content: bytes
    records: list[bytes]

    @property
    def ends(self) -> list[int]:
        """Where each record ends within the content, its line end included."""
        ends = list(accumulate(len(record) + 1 for record in self.records))
        ends[-1] = len(self.content)
        return ends


def read_blocks(file: BinaryIO, name: str, *, quoted: bool = False) -> Iterator[Block]:
    """Reads a file to its end.

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
        offset: Of the first byte.
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
    """Cuts a listing where a record says so.

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
    """How many records up to each are not blank."""
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
    """The folder that a file stands in."""
    return Place(place.storage, place.path.rpartition("/")[0], place.text.rpartition("/")[0])


def load_image(folder: Place, text: str) -> bytes:
    """Reads an image that something names.

    Args:
        folder: What relative paths stand below.
        text: A path, or an address.

    Raises:
        SourceUnavailable: It cannot be read just now.
        GraphkilnError: It can never be read.
        OSError: Likewise.
    """
    place = locate(text) if text.startswith("/") or "://" in text else folder.below(text)
    return place.storage.read(place.path, None)


def check_addresses(content: bytes, where: str) -> None:
    """Refuses addresses that no row could be read from, before anything is scored.

    Raises:
        ScoringError: There is one.
    """
    if b"://" in content and (found := _ADDRESS.search(content)):
        text = as_id(found.group().strip().decode("utf-8", "surrogateescape"))
        raise ScoringError(f"{where}: '{text}' cannot be read", hint=READABLE)


def _check_line_ends(lines: Sequence[bytes], where: str) -> None:
    """Refuses lines that end as nobody ends them any more: all of them would be one row, the path of no image."""
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
