"""Row ids, and content-defined chunking."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import Any, TypeVar
from zlib import crc32

import numpy as np
import numpy.typing as npt

from graphkiln_backend.scoring.errors import ScoringError

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
        hint = "rename it; files below it may be called as they are"
        raise ScoringError(f"'{as_id(path)}' is no UTF-8 text", hint=hint) from error
    return path


def encode_part(kind: str, values: Any) -> str:
    """Encode the range of a unit: kind of its reader, and the reader's values."""
    # With escapes, because names may contain bytes that are not text.
    return f"{kind} {json.dumps(values, separators=(',', ':'))}"


def decode_part(part: str) -> Any:
    """Decode the values of `encode_part`."""
    return json.loads(part.partition(" ")[2])


def digest(*values: str | bytes) -> str:
    """Digest separate values."""
    hashed = hashlib.sha256()
    for value in values:
        content = value if isinstance(value, bytes) else value.encode("utf-8", "surrogateescape")
        hashed.update(len(content).to_bytes(8, "little"))
        hashed.update(content)
    return hashed.hexdigest()
