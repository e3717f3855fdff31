"""What rows are called: text, whatever bytes a file's name is made of."""

from __future__ import annotations

import hashlib
import json
import re
from typing import Any

from graphkiln_backend.scoring.errors import ScoringError

_READ_AS_BYTE = re.compile(r"\\+(?=x[89a-f][0-9a-f]|[\udc80-\udcff])")


def as_id(name: str) -> str:
    r"""The id of a file's row: its name, where bytes that are no UTF-8 are written as `\xe9`.

    Backslashes that would be read so, or before such a byte, are doubled: two names never have one id.
    """
    if "\\" in name:
        name = _READ_AS_BYTE.sub(lambda found: found[0] * 2, name)
    return name.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")


def checked_text(path: str) -> str:
    """A path that a plan can hold.

    Raises:
        ScoringError: It is no UTF-8.
    """
    try:
        path.encode()
    except UnicodeEncodeError as error:
        hint = "rename it; files below it may be called as they are"
        raise ScoringError(f"'{as_id(path)}' is no UTF-8 text", hint=hint) from error
    return path


def encode_part(kind: str, values: Any) -> str:
    """What a unit says of its range: the kind of its reader, and what that reader wrote."""
    # Escapes, as names may hold bytes that are no text.
    return f"{kind} {json.dumps(values, separators=(',', ':'))}"


def decode_part(part: str) -> Any:
    """What a reader wrote of its range."""
    return json.loads(part.partition(" ")[2])


def digest(*values: str | bytes) -> str:
    """A digest of values that stand apart."""
    hashed = hashlib.sha256()
    for value in values:
        content = value if isinstance(value, bytes) else value.encode("utf-8", "surrogateescape")
        hashed.update(len(content).to_bytes(8, "little"))
        hashed.update(content)
    return hashed.hexdigest()
