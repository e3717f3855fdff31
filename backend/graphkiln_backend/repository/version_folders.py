"""Which folders of a model hold its versions: those that Triton serves, and no others.

Source: Triton's user guide, "Model Repository": folders that are not numbers, or begin with a zero, are ignored.
Tried with 24.10: `09` is ignored, `0` is a version; of `1.old`, `+1` or ` 1` it takes the number for a version, whose
folder it then does not find; a number above 2^63-1 ends it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

_MOST = 2**63 - 1
_MOST_DIGITS = len(str(_MOST))
_BEGINS_LIKE_ONE = re.compile(r"[ \t\n\v\f\r]*[+-]?[0-9]")
"""What strtol reads a number from."""


def version_number(name: str) -> int | None:
    """The number of the version that a folder of this name holds; None where it holds none."""
    if not (name.isascii() and name.isdecimal() and len(name) <= _MOST_DIGITS):
        return None
    number = int(name)
    return number if str(number) == name and number <= _MOST else None


def is_version(name: str) -> bool:
    """Whether a folder of this name holds a version."""
    return version_number(name) is not None


def confuses_triton(name: str) -> bool:
    """Whether Triton takes a folder for a version that it does not hold."""
    return _BEGINS_LIKE_ONE.match(name) is not None and not is_version(name)


def version_folders(entries: Iterable[Path]) -> dict[int, Path]:
    """The version folders among the entries of a model's folder, by number, in ascending order."""
    found = ((version_number(path.name), path) for path in entries if path.is_dir())
    return dict(sorted((number, path) for number, path in found if number is not None))
