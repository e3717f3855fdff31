"""A unit of work: a range of the input with an id that says what its answers depend on."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import pyarrow as pa

ID_DIGITS = 32


@dataclass(frozen=True, kw_only=True, slots=True)
class Unit:
    """A range of the input that is read, computed and committed as a whole.

    Attributes:
        id: Hexadecimal digits; another input or another configuration has another one.
        path: What it is a range of: a file, an object, a table; for people and for the source.
        part: The range, in the words of its source alone.
        rows: How many rows it holds.
        size_bytes: How much is read for it, where that is known; else 0.
    """

    id: str
    path: str
    part: str
    rows: int
    size_bytes: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class InputRange:
    """A range that a source finds: a unit before its configuration is known.

    Attributes:
        path: As in `Unit`.
        part: As in `Unit`. It is not part of the id: a range that only moved within its file keeps its answers.
        identity: Changes with the content and differs between ranges: names, sizes, modification times, ETags, digests
            of what is read.
        rows: As in `Unit`.
        size_bytes: As in `Unit`.
    """

    path: str
    part: str
    identity: str
    rows: int
    size_bytes: int = 0

    def unit(self, configuration: str) -> Unit:
        """The unit of this range under a configuration.

        Args:
            configuration: Digest of everything else that changes an answer.
        """
        text = "\0".join((configuration, self.path, self.identity, str(self.rows)))
        digest = hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()
        return Unit(id=digest[:ID_DIGITS], path=self.path, part=self.part, rows=self.rows, size_bytes=self.size_bytes)


# A row of the input, before anything was done with it.


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One image of the input.

    Attributes:
        id: What the row is called in the output; no other row of the source has the same.
        load: Reads the encoded image. Called by another thread than the one that found the row. Raises `InputChanged`
            or `SourceUnavailable`, which concern the whole unit; any other `GraphkilnError` or `OSError` is the error
            of this row alone.
        kept: Columns of the input that are carried along: for each an array of one element, which has its type even
            where the element is null.
    """

    id: str
    load: Callable[[], bytes]
    kept: Mapping[str, pa.Array] = field(default_factory=dict)
