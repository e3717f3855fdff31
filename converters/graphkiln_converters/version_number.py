"""The number of a new version, which belongs to one conversion only, however many end at once."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path

from graphkiln_backend.graph.errors import ConversionError
from graphkiln_backend.repository.version_folders import version_number

_TAKEN = {errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR}
"""How a rename fails where the target is there. Source: rename(2)."""


def next_number(model_folder: Path) -> int:
    """The next free version number of a model."""
    return max(_taken_numbers(model_folder), default=0) + 1


def _taken_numbers(model_folder: Path) -> list[int]:
    return [number for path in model_folder.glob("*") if (number := version_number(path.name)) is not None]


def check_free(model_folder: Path, number: int) -> None:
    """Refuses a version number that is taken.

    Raises:
        ConversionError: It is.
    """
    target = model_folder / str(number)
    if target.exists():
        raise _exists(target)


def claim(folder: Path, model_folder: Path, requested: int | None, number_it: Callable[[int], None]) -> int:
    """Renames a whole folder to its number: the one step that makes a version, and fails where there is one.

    Args:
        folder: The folder, on the file system of the model's.
        model_folder: Folder of the model.
        requested: The number; None for the next free one.
        number_it: Writes the number into the folder, before each attempt.

    Returns:
        The number.

    Raises:
        ConversionError: The requested number is taken.
        OSError: The folder cannot be renamed.
    """
    while True:
        number = requested or next_number(model_folder)
        number_it(number)
        if _rename(folder, model_folder / str(number)):
            return number
        if requested is not None:
            raise _exists(model_folder / str(number))


def _rename(folder: Path, target: Path) -> bool:
    """Whether a folder could be renamed; False where the target is there already."""
    try:
        folder.rename(target)
    except OSError as error:
        if error.errno in _TAKEN:
            return False
        raise
    return True


def _exists(target: Path) -> ConversionError:
    return ConversionError(f"{target} exists already", hint="choose another version number")
