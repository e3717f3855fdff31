"""A folder of files, of this machine or of a file system that all workers mount.

A content is written to a hidden file beside its place, made durable, and linked into its place: the link fails where
one stands already, so that the first writer wins, and a reader sees no half file. Where a file system has no links, a
rename that replaces nothing does the same; where it has neither, it is refused. What a killed writer left is removed by
the first run that begins an hour later.
"""

from __future__ import annotations

import ctypes
import errno
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from typing import BinaryIO

from graphkiln_backend.scoring.errors import ScoringError, StoreError

_UNFINISHED = ".unfinished-"
_LEFTOVER_S = 3600.0  # age of a hidden file whose writer must be dead
_NO_LINKS = {errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EXDEV}
_NO_FOLDER_SYNC = {errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS}
_AT_FDCWD, _RENAME_NOREPLACE = -100, 1  # of <fcntl.h> and <linux/fs.h>
_HINTS = {
    errno.ENOSPC: "make room there; the same command goes on",
    errno.EDQUOT: "make room within the quota, or have it raised; the same command goes on",
    errno.EFBIG: "the file system, or the limit of the process (ulimit -f), takes no file of this size",
    errno.EROFS: "it is mounted for reading only: choose another one",
    errno.EACCES: "choose a folder that this user may write",
    errno.ENOENT: "the folder must be the same on all nodes: a shared file system, or an object store",
}
_PASSING = {errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.EAGAIN, errno.EBUSY}


class FolderStore:
    """A folder. `prepare` alone makes it: a worker on a node that does not mount it must fail."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def prepare(self) -> None:
        """Make the folder, remove what killed writers left, and write a probe, twice under one name."""
        with _explained(self._folder):
            self._folder.mkdir(parents=True, exist_ok=True)
            self._remove_leftovers()
            name = f".probe-{secrets.token_hex(8)}"
            try:
                created = [self.create(name, memoryview(b"probe")) for _ in range(2)]
            finally:
                self.delete(name)
        if created != [True, False]:
            raise ScoringError(
                f"{self._folder} lets two writers create the same file", hint="choose another file system"
            )

    def place(self, name: str) -> str:
        """Its path."""
        return str(self._folder / name)

    def names(self) -> Iterator[str]:
        """List the folder once."""
        with _explained(self._folder), os.scandir(self._folder) as entries:
            yield from (entry.name for entry in entries if not entry.name.startswith("."))

    def create(self, name: str, content: memoryview) -> bool:
        """Write a hidden file and link it into its place."""
        place = self._folder / name
        with _explained(place), self._unfinished(BytesIO(content)) as unfinished:
            created = _link(unfinished, place)
            if created:
                _sync(self._folder)
            return created

    def replace(self, name: str, content: memoryview | Path) -> None:
        """Write a hidden file and rename it."""
        place = self._folder / name
        with (
            _explained(place),
            content.open("rb") if isinstance(content, Path) else BytesIO(content) as stream,
            self._unfinished(stream) as unfinished,
        ):
            unfinished.replace(place)
            _sync(self._folder)

    def read(self, name: str) -> bytes | None:
        """A file of the folder."""
        with _explained(self._folder / name):
            try:
                return (self._folder / name).read_bytes()
            except FileNotFoundError:
                return None

    def fetch(self, name: str, path: Path) -> bool:
        """Copy a file of the folder."""
        with _explained(self._folder / name):
            try:
                shutil.copyfile(self._folder / name, path)
            except FileNotFoundError:
                return False
            return True

    def open(self, name: str) -> str:
        """Its path."""
        return self.place(name)

    def delete(self, name: str) -> None:
        """Unlink a file of the folder."""
        with _explained(self._folder / name):
            (self._folder / name).unlink(missing_ok=True)

    def age_s(self, name: str) -> float | None:
        """Beside a file that is written now: both times are the file system's."""
        with _explained(self._folder), self._unfinished(BytesIO(b"now")) as unfinished:
            try:
                return unfinished.stat().st_mtime - (self._folder / name).stat().st_mtime
            except FileNotFoundError:
                return None

    @contextmanager
    def _unfinished(self, stream: BinaryIO) -> Iterator[Path]:
        """A hidden file with the content of a stream, durable; it is gone afterwards unless it was renamed."""
        path = self._folder / f"{_UNFINISHED}{secrets.token_hex(16)}"
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)  # less the umask
        try:
            with os.fdopen(descriptor, "wb") as file:
                shutil.copyfileobj(stream, file, 1 << 20)
                file.flush()
                os.fsync(file.fileno())
            yield path
        finally:
            path.unlink(missing_ok=True)

    def _remove_leftovers(self) -> None:
        for path in self._folder.glob(f"{_UNFINISHED}*"):
            if (self.age_s(path.name) or 0.0) > _LEFTOVER_S:
                path.unlink(missing_ok=True)


def _link(unfinished: Path, place: Path) -> bool:
    try:
        os.link(unfinished, place)
    except FileExistsError:
        # A file server that is asked again after its answer was lost says so of the link that it made itself.
        return unfinished.stat().st_nlink > 1
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        return _rename_exclusively(unfinished, place)
    return True


def _rename_exclusively(unfinished: Path, place: Path) -> bool:
    """Rename a file unless there is one of the new name. Source: renameat2(2), RENAME_NOREPLACE."""
    library = ctypes.CDLL(None, use_errno=True)
    old, new = os.fsencode(unfinished), os.fsencode(place)
    if library.renameat2(_AT_FDCWD, old, _AT_FDCWD, new, _RENAME_NOREPLACE) == 0:
        return True
    number = ctypes.get_errno()
    if number == errno.EEXIST:
        return False
    if number in {errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP}:
        raise ScoringError(
            f"the file system of {place.parent} has neither links nor renames that replace nothing: "
            "two attempts of a unit could both be kept",
            hint="choose another file system, an object store or a database",
        )
    raise OSError(number, os.strerror(number), str(place))


def _sync(folder: Path) -> None:
    """Make the names in a folder durable."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _NO_FOLDER_SYNC:  # file systems without it write names at once
            raise
    finally:
        os.close(descriptor)


@contextmanager
def _explained(place: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        hint = _HINTS.get(error.errno or 0, "")
        raise StoreError(
            f"{place} cannot be written or read: {error.strerror or error}", hint=hint, passing=error.errno in _PASSING
        ) from error
