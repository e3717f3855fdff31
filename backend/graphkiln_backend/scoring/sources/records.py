"""A text file as records, in blocks, with the bytes that each stands in."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate
from typing import BinaryIO

from graphkiln_backend.graph.files import MIB, format_size
from graphkiln_backend.scoring.errors import ScoringError

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
