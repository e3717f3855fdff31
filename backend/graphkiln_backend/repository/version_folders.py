"""Which folders of a model hold its versions: those that Triton counts, and no others.

Source: Triton's user guide, "Model Repository": folders that are not numbers, or begin with a zero, are ignored.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path


def version_number(name: str) -> int | None:
    """The number of the version that a folder of this name holds; None where it holds none."""
    return int(name) if name.isdecimal() and str(int(name)) == name else None


def version_folders(entries: Iterable[Path]) -> dict[int, Path]:
    """The version folders among the entries of a model's folder, by number, in ascending order."""
    found = ((version_number(path.name), path) for path in entries if path.is_dir())
    return dict(sorted((number, path) for number, path in found if number is not None))
