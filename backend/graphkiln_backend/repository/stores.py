"""Scan model stores: models, their versions, and a stamp of each that changes with its files.

Files are listed and never opened: a store may hold files that are still being written, or FIFOs.
"""

from __future__ import annotations

import errno
import hashlib
import logging
import os
import stat
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from graphkiln_backend.graph.image_model import image_model_name
from graphkiln_backend.graph.text import fault_in_served_name
from graphkiln_backend.repository.version import CONFIG_FILE
from graphkiln_backend.repository.version_folders import (
    is_ignored,
    is_version,
    reason_to_ignore,
    version_folders,
    visible,
)

_log = logging.getLogger("graphkiln.repository")

_DEEPEST = 16
# Stamp of an unreadable version; it changes when the version becomes readable.
_FAULTY = "faulty"
# A dangling link is reported by the reader of the file.
_ORDINARY = {stat.S_IFREG, stat.S_IFDIR, stat.S_IFLNK}


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredModel:
    """A model's folder in a store.

    Attributes:
        folder: The folder.
        stamp: Stamp of all its files except those of versions: it changes with the configuration and the labels.
        versions: Version number -> stamp of its files.
        problem: An error that concerns the whole model, or empty.
        faults: Version number -> an error that concerns this version only.
        unreadable: Whether the folder exists but cannot be read; it is not treated as empty.
        tensor_model: For an image model, the model that gets the decoded images; else empty.
    """

    folder: Path
    stamp: str = ""
    versions: Mapping[int, str] = field(default_factory=dict)
    problem: str = ""
    faults: Mapping[int, str] = field(default_factory=dict)
    unreadable: bool = False
    tensor_model: str = ""

    @property
    def name(self) -> str:
        """Name of the model."""
        return image_model_name(self.tensor_model) if self.tensor_model else self.folder.name

    @property
    def sound_versions(self) -> list[int]:
        """Return the versions without faults."""
        return [version for version in self.versions if version not in self.faults]


def scan_stores(stores: Sequence[Path]) -> dict[str, StoredModel]:
    """Scan all models of some stores, by name.

    Folders that are not models (see `version_folders`) or whose names Triton cannot use are ignored and logged.

    Args:
        stores: The stores; a model in two of them has a problem.

    Raises:
        OSError: A store cannot be listed.
    """
    found: dict[str, StoredModel] = {}
    for store in stores:
        for folder in model_folders(store):
            if reason := reason_to_ignore(folder):
                _log_once(logging.WARNING, f"{folder} is ignored: {reason}")
            elif fault := fault_in_served_name(folder.name):
                _log_once(logging.ERROR, f"a folder of {folder.parent} is not served: {fault}: rename it")
            elif first := found.get(folder.name):
                problem = f"the model is in two stores: {first.folder} and {folder}; rename or remove one of them"
                found[folder.name] = StoredModel(
                    folder=first.folder, stamp=first.stamp, versions=first.versions, problem=problem
                )
            else:
                found[folder.name] = _scan_model(folder)
    return found


@cache  # once, however often the stores are scanned
def _log_once(level: int, text: str) -> None:
    _log.log(level, "%s", text)


def model_folders(store: Path) -> list[Path]:
    """List the folders of a store that may hold models. Hidden folders are ignored, as in Triton.

    Args:
        store: The store.

    Raises:
        OSError: It cannot be listed.
    """
    return sorted(path for path in store.iterdir() if not is_ignored(path.name) and _is_folder(path))


def _is_folder(path: Path) -> bool:
    """Return true for a folder, a dangling link, or one that this user may not read."""
    try:
        return path.is_dir() or (path.is_symlink() and not path.exists())
    except OSError:
        return True


def model_at(path: Path) -> Path | None:
    """Find the model folder of a path to a model, a version or a graph; None for any other path."""
    path = path.absolute()
    if path.is_file() and path.suffix in (".onnx", ".xml"):
        path = path.parent
    for folder in (path, path.parent):
        if (folder == path or is_version(path.name)) and folder.is_dir() and _holds_model(folder):
            return folder
    return None


def _holds_model(folder: Path) -> bool:
    """Return true for a folder of versions; false for a store of models whose names are numbers."""
    return (folder / CONFIG_FILE).is_file() or any(
        is_version(path.name) and path.is_dir() and not _holds_versions(path) for path in folder.iterdir()
    )


def _holds_versions(folder: Path) -> bool:
    return (folder / CONFIG_FILE).is_file() or bool(version_folders(folder.iterdir()))


def _scan_model(folder: Path) -> StoredModel:
    try:
        entries = visible(folder)  # without those of a conversion in progress
        versions = version_folders(entries)
        rest = [path for path in entries if path not in versions.values()]
        problem = "" if versions else _without_versions(folder, entries)
        faults = {number: fault for number, path in versions.items() if (fault := _fault(path))}
        stamps = {number: _FAULTY if number in faults else _stamp([path]) for number, path in versions.items()}
        problem = next(filter(None, map(_irregular, rest)), "") or problem
        return StoredModel(folder=folder, stamp=_stamp(rest), versions=stamps, problem=problem, faults=faults)
    except OSError as error:  # it is being changed, or permission is denied
        linked = folder.is_symlink()  # its target may be on an unmounted disk
        problem = f"{folder} cannot be read: {error.strerror or error}"
        if isinstance(error, FileNotFoundError) and linked:
            problem = f"{folder} is a link that leads nowhere: {folder.readlink()} is not there"
        return StoredModel(
            folder=folder, problem=problem, unreadable=linked or not isinstance(error, FileNotFoundError)
        )


def _without_versions(folder: Path, entries: Sequence[Path]) -> str:
    if any(map(_holds_versions, filter(Path.is_dir, entries))):
        return f"{folder} is a model store, not a model: name it by --model-store, or move its models up"
    return f"{folder} has no version folder: make {folder.name}/1"


def _fault(version: Path) -> str:
    """Describe why a version's folder cannot be read, or return an empty string."""
    try:
        return _irregular(version)
    except OSError as error:
        return f"{version} cannot be read: {error.strerror or error}"


def _stamp(paths: Sequence[Path]) -> str:
    """Hash names and inodes of all files and folders below some paths, and sizes and times of files."""
    digest = hashlib.sha256()
    for path in sorted(paths):
        for file, status in walk(path):
            kind = stat.S_IFMT(status.st_mode)
            # A folder's entries follow; its time also changes with ignored ones, such as `__pycache__`.
            written = (0, 0) if kind == stat.S_IFDIR else (status.st_size, status.st_mtime_ns)
            line = (str(file), *written, status.st_ino, kind)
            digest.update(repr(line).encode())
    return digest.hexdigest()[:16]


def _irregular(folder: Path) -> str:
    """Find a FIFO, socket or device, which could block a reader forever; empty for none."""
    for path, status in walk(folder):
        if stat.S_IFMT(status.st_mode) not in _ORDINARY:
            return f"{path} is neither a file nor a folder"
    return ""


def walk(path: Path, depth: int = 0) -> Iterator[tuple[Path, os.stat_result]]:
    """Yield a path and all paths below it, with the status of their targets, in a fixed order, without hidden ones.

    Args:
        path: Where to begin.
        depth: Depth of the path.

    Raises:
        OSError: A folder cannot be listed, or folders are nested too deep, perhaps by a link to a parent.
    """
    if depth > _DEEPEST:
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
    try:
        status = path.stat()
    except OSError as error:
        if error.errno not in {errno.ENOENT, errno.ELOOP}:
            raise
        status = path.lstat()  # a dangling or circular link, or a file that was just deleted
    yield path, status
    if stat.S_ISDIR(status.st_mode):
        for entry in sorted(path.iterdir()):
            if not is_ignored(entry.name):
                yield from walk(entry, depth + 1)
