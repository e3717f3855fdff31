"""Version folders as Triton recognizes them, and entries of a store to ignore.

Source: Triton's user guide, "Model Repository": folders whose names are not numbers or begin with a zero are ignored.
Observed with 24.10: `09` is ignored and `0` is a version, but names such as `1.old`, `+1` and ` 1` are parsed as
version numbers, whose folders Triton then does not find. Numbers above 2^63-1 are not supported.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

_MOST = 2**63 - 1
_MOST_DIGITS = len(str(_MOST))
# Names from which C's strtol parses a number.
_BEGINS_WITH_NUMBER = re.compile(r"[ \t\n\v\f\r]*[+-]?[0-9]")


def version_number(name: str) -> int | None:
    """Parse the name of a version folder; None if it is not one."""
    if not (name.isascii() and name.isdecimal() and len(name) <= _MOST_DIGITS):
        return None
    number = int(name)
    return number if str(number) == name and number <= _MOST else None


def is_version(name: str) -> bool:
    """Return true if this is the name of a version folder."""
    return version_number(name) is not None


def confuses_triton(name: str) -> bool:
    """Return true for names that Triton would misread as version numbers."""
    return _BEGINS_WITH_NUMBER.match(name) is not None and not is_version(name)


def version_folders(entries: Iterable[Path]) -> dict[int, Path]:
    """Select the version folders among the entries of a model's folder, keyed by number in ascending order."""
    found = ((version_number(path.name), path) for path in entries if path.is_dir())
    return dict(sorted((number, path) for number, path in found if number is not None))


# A folder without a version that contains files of a model is a broken model, which readiness reports. A folder that
# is empty or holds only other files (notes, scripts, pictures) is ignored.

# Folders of file systems and tools. Sources: mke2fs(8); Synology DiskStation Manager; NTFS; Apple's Archive Utility;
# PEP 3147.
_SYSTEM_FOLDERS = frozenset(
    {"lost+found", "@eaDir", "System Volume Information", "$RECYCLE.BIN", "#recycle", "__MACOSX", "__pycache__"}
)
_FILES = frozenset({"config.pbtxt", "labels.txt", "model.py", "saved_model.pb"})
_SUFFIXES = frozenset(
    {".onnx", ".ort", ".pt", ".pth", ".ckpt", ".safetensors", ".plan", ".engine", ".trt", ".graphdef", ".savedmodel"}
    | {".mlir", ".tflite", ".keras"}
)
_LIKE_A_VERSION = re.compile(r"(v|ver|version)?[-_. ]?[0-9]+([._][0-9]+)*", re.IGNORECASE)
# Finds `NAME/model/1/model.onnx`: a model that was copied with an extra folder around it.
_MAX_DEPTH = 3


def is_ignored(name: str) -> bool:
    """Return true for hidden names and for folders of file systems and tools."""
    return name.startswith(".") or name in _SYSTEM_FOLDERS


def visible(folder: Path) -> list[Path]:
    """List a folder without ignored entries.

    Raises:
        OSError: The folder cannot be listed.
    """
    return [path for path in folder.iterdir() if not is_ignored(path.name)]


def reason_to_ignore(folder: Path) -> str:
    """Explain why a folder of a store is not a model.

    Returns an empty string for a model, a broken model, and a folder that cannot be read.
    """
    try:
        entries = visible(folder)
        if version_folders(entries) or _contain_model_files(entries, depth=1):
            return ""
    except OSError:
        return ""
    if not entries:
        return f"the folder is empty; expected a version folder {folder.name}/1"
    return f"the folder holds no files of a model; expected a version folder {folder.name}/1"


def _contain_model_files(entries: list[Path], depth: int) -> bool:
    """Return true if a file of a model is among entries or below them. Links to folders are not followed."""
    if any(map(_is_model_file, entries)):
        return True
    folders = [path for path in entries if depth < _MAX_DEPTH and path.is_dir() and not path.is_symlink()]
    return any(_contain_model_files(visible(path), depth + 1) for path in folders)


def _is_model_file(path: Path) -> bool:
    known = path.name in _FILES or path.suffix.lower() in _SUFFIXES
    known = known or (path.suffix == ".xml" and path.with_suffix(".bin").is_file())  # OpenVINO IR
    return known or (_LIKE_A_VERSION.fullmatch(path.name) is not None and path.is_dir())
