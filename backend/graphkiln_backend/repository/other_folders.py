"""What lies in a model store beside models, and is passed over: of file systems, of tools, and folders of other things.

A folder without any version is a broken model as soon as something in it looks like a part of one: its owner must be
told, and readiness says so. An empty folder, or one of notes, scripts or pictures, is no model that anybody would miss.
"""

from __future__ import annotations

import re
from pathlib import Path

from graphkiln_backend.repository.version_folders import version_folders

_OF_OTHERS = frozenset(
    {"lost+found", "@eaDir", "System Volume Information", "$RECYCLE.BIN", "#recycle", "__MACOSX", "__pycache__"}
)
"""Folders that nobody has put there. The root of each ext4 volume has the first one, which only root may open; Python
writes the last one beside the programs of Triton's Python backend when they are loaded.
Source: mke2fs(8); Synology DiskStation Manager; NTFS; Apple's Archive Utility; PEP 3147."""
_FILES = frozenset({"config.pbtxt", "labels.txt", "model.py", "saved_model.pb"})
_SUFFIXES = frozenset(
    {".onnx", ".ort", ".pt", ".pth", ".ckpt", ".safetensors", ".plan", ".engine", ".trt", ".graphdef", ".savedmodel"}
    | {".mlir", ".tflite", ".keras"}
)
_LIKE_A_VERSION = re.compile(r"(v|ver|version)?[-_. ]?[0-9]+([._][0-9]+)*", re.IGNORECASE)
_DEEPEST = 3
"""`NAME/model/1/model.onnx` lies so deep: a model that was copied with a folder too many around it."""


def is_passed_over(name: str) -> bool:
    """Whether a file or folder of this name is no part of a store, a model or a version."""
    return name.startswith(".") or name in _OF_OTHERS


def visible(folder: Path) -> list[Path]:
    """What lies in a folder and is not passed over.

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
    """Whether any of these is a part of a model, or a folder that holds one; links to folders are not followed."""
    if any(map(_is_part, entries)):
        return True
    folders = [path for path in entries if depth < _DEEPEST and path.is_dir() and not path.is_symlink()]
    return any(_hold_part(visible(path), depth + 1) for path in folders)


def _is_part(path: Path) -> bool:
    known = path.name in _FILES or path.suffix.lower() in _SUFFIXES
    return known or (_LIKE_A_VERSION.fullmatch(path.name) is not None and path.is_dir())
