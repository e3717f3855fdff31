"""A local folder, or a folder of a file system that all workers mount.

A file is written under a hidden name, synchronized, and hard-linked to its name: the link fails if the name exists, so
that the first writer wins, and readers see complete files only. Without hard links, an exclusive rename is used; a file
system without either is refused. Files of killed writers are removed by the first run after an hour.
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
_LEFTOVER_S = 3600.0  # age of a hidden file whose writer is assumed dead
_NO_LINKS = {errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EXDEV}
_NO_FOLDER_SYNC = {errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS}
_AT_FDCWD, _RENAME_NOREPLACE = -100, 1  # from <fcntl.h> and <linux/fs.h>
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
    """A folder, created by `prepare` only: workers must fail on nodes that do not mount it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def prepare(self) -> None:
        """Create the folder, remove files of killed writers, and check that creating a name twice fails."""
        with _explained(self._folder):
            self._folder.mkdir(parents=True, exist_ok=True)
            for path in self._folder.glob(f"{_UNFINISHED}*"):
                if (self.age_s(path.name) or 0.0) > _LEFTOVER_S:
                    path.unlink(missing_ok=True)
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
        """Path of a name."""
        return str(self._folder / name)

    def names(self) -> Iterator[str]:
        """List the folder."""
        with _explained(self._folder), os.scandir(self._folder) as entries:
            yield from (entry.name for entry in entries if not entry.name.startswith("."))

    def create(self, name: str, content: memoryview) -> bool:
        """Write a hidden file and link it to its name."""
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
        """Read a file of the folder."""
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
        """Path of a name."""
        return self.place(name)

    def delete(self, name: str) -> None:
        """Delete a file of the folder."""
        with _explained(self._folder / name):
            (self._folder / name).unlink(missing_ok=True)

    def age_s(self, name: str) -> float | None:
        """Compare with a file written now: both times are those of the file system."""
        with _explained(self._folder), self._unfinished(BytesIO(b"now")) as unfinished:
            try:
                return unfinished.stat().st_mtime - (self._folder / name).stat().st_mtime
            except FileNotFoundError:
                return None

    @contextmanager
    def _unfinished(self, stream: BinaryIO) -> Iterator[Path]:
        """Write a stream to a synchronized hidden file, deleted afterwards unless it was renamed."""
        path = self._folder / f"{_UNFINISHED}{secrets.token_hex(16)}"
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)  # minus the umask
        try:
            with os.fdopen(descriptor, "wb") as file:
                shutil.copyfileobj(stream, file, 1 << 20)
                file.flush()
                os.fsync(file.fileno())
            yield path
        finally:
            path.unlink(missing_ok=True)


def _link(unfinished: Path, place: Path) -> bool:
    try:
        os.link(unfinished, place)
    except FileExistsError:
        # A network file system may report this for its own link, if its response was lost and the request repeated.
        return unfinished.stat().st_nlink > 1
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        return _rename_exclusively(unfinished, place)
    return True


def _rename_exclusively(unfinished: Path, place: Path) -> bool:
    """Rename a file unless the new name exists. Source: renameat2(2), RENAME_NOREPLACE."""
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
    """Synchronize the names in a folder."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _NO_FOLDER_SYNC:  # not needed on file systems without it
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
