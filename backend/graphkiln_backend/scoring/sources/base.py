"""Interface of sources: ranges for the plan, rows for workers."""

from __future__ import annotations

import hashlib
import json
import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from typing import Any, Protocol, TypeVar
from zlib import crc32

import numpy as np
import numpy.typing as npt

from graphkiln_backend.graph.errors import InvalidInput
from graphkiln_backend.scoring.errors import ScoringError
from graphkiln_backend.scoring.messages import InputRange, Row, Unit
from graphkiln_backend.scoring.sources.places import Place
from graphkiln_backend.scoring.sources.storage import StoredFile

# Row ids, and content-defined chunking.

# Content-defined chunking of row names: adding or removing a row changes at most two chunks.
#
# A name ends a chunk if its hash falls into a fraction 1/N, so that chunks have N rows on average; one in a thousand is
# seven times as long. A minimum or maximum length would make each boundary depend on the previous one.
# Source: content-defined chunking, as in Muthitacharoen, Chen, Mazières: "A Low-bandwidth Network File System", 2001.

T = TypeVar("T")

_BLOCK = 256  # names hashed at a time


def find_ends(names: Sequence[bytes], rows: int) -> npt.NDArray[np.bool_]:
    """Mark the names that end a chunk.

    Args:
        names: Names of the rows.
        rows: Average number of rows of a chunk.
    """
    mixed = np.fromiter(map(crc32, names), np.uint32, len(names))
    # Checksums of consecutive numbers are not uniform. Source of the constants: MurmurHash3's finalizer (fmix32).
    mixed ^= mixed >> np.uint32(16)
    mixed *= np.uint32(0x85EBCA6B)
    mixed ^= mixed >> np.uint32(13)
    mixed *= np.uint32(0xC2B2AE35)
    mixed ^= mixed >> np.uint32(16)
    ends: npt.NDArray[np.bool_] = mixed <= np.uint32((2**32 - 1) // rows)
    return ends


def cut(members: Iterable[T], rows: int, name: Callable[[T], bytes]) -> Iterator[list[T]]:
    """Divide a stream into chunks.

    Args:
        members: The rows.
        rows: Average number of rows of a chunk.
        name: Returns the name of a row.
    """
    chunk: list[T] = []
    unread = iter(members)
    while block := list(islice(unread, _BLOCK)):
        for member, is_end in zip(block, find_ends([name(one) for one in block], rows).tolist(), strict=True):
            chunk.append(member)
            if is_end:
                yield chunk
                chunk = []
    if chunk:
        yield chunk


_READ_AS_BYTE = re.compile(r"\\+(?=x[89a-f][0-9a-f]|[\udc80-\udcff])")


def as_id(name: str) -> str:
    r"""Row id of a file: its name, with bytes that are not UTF-8 written as `\xe9`.

    Ambiguous backslashes are doubled, so that ids are unique.
    """
    if "\\" in name:
        name = _READ_AS_BYTE.sub(lambda found: found[0] * 2, name)
    return name.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")


def checked_text(path: str) -> str:
    """Check that a path is UTF-8.

    Raises:
        ScoringError: It is not UTF-8.
    """
    try:
        path.encode()
    except UnicodeEncodeError as error:
        hint = "rename it; the names of files below it may stay as they are"
        raise ScoringError(f"'{as_id(path)}' is not UTF-8 text", hint=hint) from error
    return path


def encode_part(kind: str, values: Any) -> str:
    """Encode the range of a unit: kind of its reader, and the reader's values."""
    # With escapes, because names may contain bytes that are not text.
    return f"{kind} {json.dumps(values, separators=(',', ':'))}"


def decode_part(part: str) -> Any:
    """Decode the values of `encode_part`."""
    return json.loads(part.partition(" ")[2])


def digest(*values: str | bytes) -> str:
    """Compute a SHA-256 of the values and their lengths."""
    hashed = hashlib.sha256()
    for value in values:
        content = value if isinstance(value, bytes) else value.encode("utf-8", "surrogateescape")
        hashed.update(len(content).to_bytes(8, "little"))
        hashed.update(content)
    return hashed.hexdigest()


REPEATED = "row ids must be unique: remove the duplicates, or choose another column with --id-column"
_R = TypeVar("_R")


class Source(Protocol):
    """An input, opened by its text on the driver and on each worker. Thread-safe.

    Errors of a single row are raised by its `load`; errors of the input by these methods.
    """

    def ranges(self, rows: int) -> Iterator[InputRange]:
        """Yield the ranges of the input in a fixed order; memory must not grow with their number.

        Args:
            rows: Approximate number of rows of a range.

        Raises:
            ScoringError: The input cannot be listed.
        """
        ...

    def rows(self, unit: Unit) -> Iterator[Row]:
        """Yield the rows of a unit in a fixed order, exactly `unit.rows` of them.

        Raises:
            InputChanged: The input changed since it was planned.
            SourceUnavailable: A temporary I/O or network error.
            ScoringError: The unit cannot be read.
        """
        ...


class FileReader(Protocol):
    """Reader of one kind of file."""

    def ranges(self, place: Place, files: Iterator[StoredFile], rows: int) -> Iterator[InputRange]:
        """Yield the ranges of files below `place`, like `Source.ranges`."""
        ...

    def rows(self, unit: Unit) -> Iterator[Row]:
        """Yield the rows of a unit, like `Source.rows`."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Columns:
    """Columns of a run.

    Attributes:
        image: Column of the image or its path; empty to detect it.
        id: Column of row ids; empty for the image's path, or the row's position.
        kept: Columns copied to the results.
    """

    image: str = ""
    id: str = ""
    kept: tuple[str, ...] = ()

    def refuse(self, what: str) -> None:
        """Refuse columns for an input without columns.

        Raises:
            ScoringError: Columns are requested.
        """
        if self != Columns():
            raise ScoringError(f"{what} have no columns", hint="leave out --image-column, --id-column, --keep-columns")

    def check(self, known: Iterable[str], where: str) -> None:
        """Check that each column exists.

        Raises:
            ScoringError: There is no such column, or more than one.
        """
        names = list(known)
        for name in filter(None, (self.image, self.id, *self.kept)):
            if name not in names:
                raise ScoringError(f"{where} has no column '{name}'", hint=f"it has {', '.join(names)}")
            if names.count(name) > 1:
                raise ScoringError(f"{where} has two columns named '{name}'", hint="rename one of them")


def refuse_row(reason: str) -> bytes:
    """Raise an error, as `Row.load` of an unreadable row.

    Raises:
        InvalidInput: Always, with the reason.
    """
    raise InvalidInput(reason)


def map_ahead(function: Callable[[T], _R], items: Iterable[T], threads: int = 8) -> Iterator[_R]:
    """Map items in threads, in order, with at most one pending result per thread."""
    waiting: deque[Future[_R]] = deque()
    with ThreadPoolExecutor(threads, thread_name_prefix="ahead") as pool:
        try:
            for item in items:
                waiting.append(pool.submit(function, item))
                if len(waiting) > threads:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            for future in waiting:
                future.cancel()
