"""Files that were fetched before a process was stopped or killed, or the network failed: nobody need fetch them again.

Each is noted once it is whole, in a line of its own; of what came in part, nothing is noted.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from graphkiln_backend.repository.remote_files import RemoteFile

_NOTES = ".whole"

Listed = tuple[str, RemoteFile]
"""A path in the store, and what was listed there."""


@dataclass(frozen=True, slots=True)
class KeptFiles:
    """Files that were fetched into folders of which nothing was taken over.

    Attributes:
        places: Where each of them lies.
        folders: What holds them.
    """

    places: Mapping[Listed, Path] = field(default_factory=dict)
    folders: tuple[Path, ...] = ()

    @classmethod
    def find(cls, staging: Path) -> KeptFiles:
        """What lies in the folders of a folder; all else in them is removed.

        Raises:
            OSError: The folder cannot be read.
        """
        places: dict[Listed, Path] = {}
        folders = []
        for folder in staging.iterdir():
            noted = dict(_read_notes(folder))
            _keep_only(set(noted.values()), folder)
            if noted:
                folders.append(folder)
            places |= noted
        return cls(places, tuple(folders))

    def link(self, path: str, file: RemoteFile, folder: Path) -> bool:
        """Puts a file into another folder, too; whether there is one.

        Raises:
            OSError: It cannot be linked.
        """
        if (path, file) not in self.places:
            return False
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        os.link(self.places[path, file], folder / path)
        note(path, file, folder)
        return True

    def forget(self) -> None:
        """Removes the folders; what was linked stays."""
        for folder in self.folders:
            shutil.rmtree(folder, ignore_errors=True)


def note(path: str, file: RemoteFile, folder: Path) -> None:
    """Notes that a file lies in a folder, whole; many threads may do so.

    Raises:
        OSError: It cannot be written.
    """
    with (folder / _NOTES).open("a") as notes:
        notes.write(json.dumps([path, file.stamp, file.size]) + "\n")


def _read_notes(folder: Path) -> Iterator[tuple[Listed, Path]]:
    with suppress(OSError):
        for line in (folder / _NOTES).read_text().splitlines():
            with suppress(ValueError, TypeError, OSError):  # cut off, or without its file
                path, stamp, size = json.loads(line)
                if (folder / path).stat().st_size == size:
                    yield (path, RemoteFile(stamp, size)), folder / path


def _keep_only(files: set[Path], folder: Path) -> None:
    if not files:
        shutil.rmtree(folder, ignore_errors=True)
        return
    for path in [path for path in folder.rglob("*") if path.is_file() and path.name != _NOTES]:
        if path not in files:
            path.unlink()
