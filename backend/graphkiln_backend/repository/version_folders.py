"""Version folders, as Triton recognizes them, and entries of a store that are ignored.

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
# What strtol reads a number from.
_BEGINS_LIKE_ONE = re.compile(r"[ \t\n\v\f\r]*[+-]?[0-9]")


def version_number(name: str) -> int | None:
    """The number of the version that a folder of this name holds; None where it holds none."""
    if not (name.isascii() and name.isdecimal() and len(name) <= _MOST_DIGITS):
        return None
    number = int(name)
    return number if str(number) == name and number <= _MOST else None


def is_version(name: str) -> bool:
    """Return true where a folder of this name holds a version."""
    return version_number(name) is not None


def confuses_triton(name: str) -> bool:
    """Return true for names that Triton mistakes for version numbers."""
    return _BEGINS_LIKE_ONE.match(name) is not None and not is_version(name)


def version_folders(entries: Iterable[Path]) -> dict[int, Path]:
    """The version folders among the entries of a model's folder, by number, in ascending order."""
    found = ((version_number(path.name), path) for path in entries if path.is_dir())
    return dict(sorted((number, path) for number, path in found if number is not None))


# Entries of a model store that are no models: of file systems, of tools, and folders of other things.
#
# A folder without a version is a broken model as soon as it contains a part of a model: readiness reports it. An empty
# folder, or one of notes, scripts or pictures, is ignored.

# Folders of file systems and tools. The root of each ext4 volume has the first one, which only root may open; Python
# writes the last one beside the programs of Triton's Python backend when they are loaded. Source: mke2fs(8); Synology
# DiskStation Manager; NTFS; Apple's Archive Utility; PEP 3147.
_OF_OTHERS = frozenset(
    {"lost+found", "@eaDir", "System Volume Information", "$RECYCLE.BIN", "#recycle", "__MACOSX", "__pycache__"}
)
_FILES = frozenset({"config.pbtxt", "labels.txt", "model.py", "saved_model.pb"})
_SUFFIXES = frozenset(
    {".onnx", ".ort", ".pt", ".pth", ".ckpt", ".safetensors", ".plan", ".engine", ".trt", ".graphdef", ".savedmodel"}
    | {".mlir", ".tflite", ".keras"}
)
_LIKE_A_VERSION = re.compile(r"(v|ver|version)?[-_. ]?[0-9]+([._][0-9]+)*", re.IGNORECASE)
# `NAME/model/1/model.onnx` has this depth: a model that was copied with a folder too many around it.
_DEEPEST = 3


def is_passed_over(name: str) -> bool:
    """Return true for hidden names and those of tools and file systems."""
    return name.startswith(".") or name in _OF_OTHERS


def visible(folder: Path) -> list[Path]:
    """List a folder without ignored entries.

    Raises:
        OSError: It cannot be listed.
    """
    return [path for path in folder.iterdir() if not is_passed_over(path.name)]


def reason_to_pass_over(folder: Path) -> str:
    """Why a folder of a store is no model, in words; empty where it is one, a broken one, or cannot be read.

    Args:
        folder: The folder.
    """
    try:
        entries = visible(folder)
        if version_folders(entries) or _hold_part(entries, depth=1):
            return ""
    except OSError:
        return ""
    if not entries:
        return f"it is empty; a model has a version folder, {folder.name}/1"
    return f"nothing in it is of a model; a model has a version folder, {folder.name}/1"


def _hold_part(entries: list[Path], depth: int) -> bool:
    """Search entries and their folders for a part of a model; links to folders are not followed."""
    if any(map(_is_part, entries)):
        return True
    folders = [path for path in entries if depth < _DEEPEST and path.is_dir() and not path.is_symlink()]
    return any(_hold_part(visible(path), depth + 1) for path in folders)


def _is_part(path: Path) -> bool:
    known = path.name in _FILES or path.suffix.lower() in _SUFFIXES
    return known or (_LIKE_A_VERSION.fullmatch(path.name) is not None and path.is_dir())
