"""Storage of input files: the interface, and files of a local or shared file system."""

from __future__ import annotations

import errno
import logging
import os
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from io import SEEK_SET, BufferedIOBase
from pathlib import Path
from typing import BinaryIO, Protocol, TypeVar, cast

from graphkiln_backend.graph.errors import GraphkilnError
from graphkiln_backend.graph.files import GIB, UnusableFile, format_size, open_regular, read_stream
from graphkiln_backend.scoring.errors import InputChanged, ScoringError, SourceUnavailable

IMAGE_LIMIT = GIB  # maximum size of an encoded image
# Errors of the disk, the network or this process, not of the file.
_PASSING = {errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOTCONN}
_T = TypeVar("_T")
_log = logging.getLogger("graphkiln.scoring")


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredFile:
    """A file or object.

    Attributes:
        path: Path below the listed folder, or as named.
        size: Size in bytes.
        stamp: Changes with the content; empty for a dangling link.
    """

    path: str
    size: int
    stamp: str


class Storage(Protocol):
    """Files by full path. Thread-safe."""

    def walk(self, folder: str) -> Iterator[StoredFile]:
        """Yield all non-hidden files below a folder, sorted by the bytes of their paths; nothing if there is no folder.

        Raises:
            ScoringError: A folder cannot be listed.
        """
        ...

    def find(self, path: str) -> StoredFile | None:
        """Look up a file; return None if there is none, or it is a folder.

        Raises:
            ScoringError: Its status cannot be read.
        """
        ...

    def read(self, path: str, stamp: str | None, part: tuple[int, int] | None = None) -> bytes:
        """Read an image.

        Args:
            path: The file.
            stamp: Expected stamp, or None to accept any.
            part: Offset and size of the part to read; None for all.

        Raises:
            InputChanged: The file was replaced or deleted since it was listed.
            SourceUnavailable: A temporary I/O or network error.
            GraphkilnError: A permanent error, such as a missing permission.
            OSError: A permanent error, or the file is too large or missing.
        """
        ...

    def open(self, path: str, stamp: str | None = None) -> BinaryIO:
        """Open a file of many images for partial reads.

        Raises:
            InputChanged: The file was replaced or deleted since it was listed.
            ScoringError: The file cannot be opened.
        """
        ...


def check_size(size: int) -> None:
    """Refuse an image above `IMAGE_LIMIT` before it is read.

    Raises:
        UnusableFile: It is too large.
    """
    if size > IMAGE_LIMIT:
        raise UnusableFile(f"it has {format_size(size)}, more than the maximum of {format_size(IMAGE_LIMIT)}")


class OpenedFile(BufferedIOBase):
    """A file that translates errors of its library, also when it is read by Arrow, tarfile or line by line.

    Otherwise a network error would be taken for a damaged file or row.

    Args:
        file: The library's file; owned.
        explain: Translates an error of the library.
    """

    def __init__(self, file: BinaryIO, explain: Callable[[Exception], GraphkilnError]) -> None:
        self._file, self._explain = file, explain

    def read(self, size: int | None = -1, /) -> bytes:
        """Read bytes."""
        everything = size is None or size < 0  # files of Arrow take no -1
        return self._explained(lambda: self._file.read() if everything else self._file.read(size or 0))

    def seek(self, offset: int, whence: int = SEEK_SET, /) -> int:
        """Change the position."""
        return self._explained(lambda: self._file.seek(offset, whence))

    def tell(self) -> int:
        """Return the position."""
        return self._explained(self._file.tell)

    def readable(self) -> bool:
        """Return True."""
        return True

    def seekable(self) -> bool:
        """Return True."""
        return True

    def close(self) -> None:
        """Close the file of the library."""
        try:
            self._file.close()
        finally:
            super().close()

    def _explained(self, call: Callable[[], _T]) -> _T:
        try:
            return call()
        except GraphkilnError:
            raise
        except Exception as error:
            raise self._explain(error) from error


class LocalStorage:
    """Files by absolute path. Links are followed, except links to a parent folder."""

    def walk(self, folder: str) -> Iterator[StoredFile]:
        """Walk folder by folder; the names of one folder are sorted in memory."""
        try:
            is_there = Path(folder).is_dir()
        except OSError as error:  # a parent folder cannot be entered
            raise _failure(folder, error) from error
        if is_there:
            yield from _walk(os.fsencode(folder), b"", ())

    def find(self, path: str) -> StoredFile | None:
        """Look up a regular file."""
        try:
            status = Path(path).stat()
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (OSError, ValueError) as error:
            raise ScoringError(f"cannot access {path}: {error}") from error
        return _describe(path, status) if stat.S_ISREG(status.st_mode) else None

    def read(self, path: str, stamp: str | None, part: tuple[int, int] | None = None) -> bytes:
        """Read a file, and check that it did not change meanwhile."""
        try:
            with open_regular(path, None if part else IMAGE_LIMIT) as file:
                _check(path, file, stamp)
                content = _read_part(file, *part) if part else read_stream(file, IMAGE_LIMIT)
                _check(path, file, stamp)
        except OSError as error:
            if error.errno in _PASSING:
                raise SourceUnavailable(f"cannot read {path}: {error.strerror}") from error
            if error.errno == errno.ENOENT and stamp:
                raise InputChanged(f"{path} was deleted since it was planned") from error
            raise
        return content

    def open(self, path: str, stamp: str | None = None) -> BinaryIO:
        """Open a file; `find` detects afterwards whether it was replaced."""
        try:
            file = open_regular(path)
        except FileNotFoundError as error:
            kind = ScoringError if stamp is None else InputChanged
            raise kind(f"no such file: {path}") from error
        except OSError as error:
            raise _failure(path, error) from error
        try:
            _check(path, file, stamp)
        except BaseException:
            file.close()
            raise
        return cast("BinaryIO", OpenedFile(file, partial(_failure, path)))


def _walk(folder: bytes, prefix: bytes, above: tuple[tuple[int, int], ...]) -> Iterator[StoredFile]:
    try:
        status = os.stat(folder)  # noqa: PTH116 - Path does not accept bytes
        here = status.st_dev, status.st_ino
        if here in above:
            _log.warning("%s is a link to a folder that contains it: not followed", os.fsdecode(folder))
            return
        with os.scandir(folder) as entries:
            # Folders end with a slash, so that paths are sorted like in a bucket.
            names = sorted(
                each.name + b"/" if _is_folder(each) else each.name for each in entries if each.name[:1] != b"."
            )
    except OSError as error:
        raise _failure(os.fsdecode(folder), error) from error
    for name in names:
        if name.endswith(b"/"):
            yield from _walk(folder + b"/" + name[:-1], prefix + name, (*above, here))
        else:
            yield _describe_entry(folder + b"/" + name, os.fsdecode(prefix + name))


def _is_folder(entry: os.DirEntry[bytes]) -> bool:
    try:
        return entry.is_dir()
    except OSError as error:
        if error.errno == errno.ELOOP:  # a link to itself: reported by its row
            return False
        raise


def _describe_entry(path: bytes, name: str) -> StoredFile:
    try:
        return _describe(name, os.stat(path))  # noqa: PTH116
    except OSError as error:
        if error.errno in {errno.ENOENT, errno.ELOOP}:  # a dangling link, or just deleted: reported by its row
            return StoredFile(path=name, size=0, stamp="")
        raise _failure(os.fsdecode(path), error) from error


def _describe(path: str, status: os.stat_result) -> StoredFile:
    return StoredFile(path=path, size=status.st_size, stamp=_stamp(status))


def _stamp(status: os.stat_result) -> str:
    return f"{status.st_size:x}.{status.st_mtime_ns:x}"


def _check(path: str, file: BinaryIO, stamp: str | None) -> None:
    if stamp is not None and _stamp(os.fstat(file.fileno())) != stamp:
        raise InputChanged(f"{path} has changed since it was planned")


def _read_part(file: BinaryIO, offset: int, size: int) -> bytes:
    content = os.pread(file.fileno(), size, offset)
    while len(content) < size and (more := os.pread(file.fileno(), size - len(content), offset + len(content))):
        content += more
    return content


def _failure(path: str, error: Exception) -> ScoringError:
    number = error.errno if isinstance(error, OSError) else None
    words = f"cannot read {path}: {getattr(error, 'strerror', None) or error}"
    if number in _PASSING:
        return SourceUnavailable(words)
    hint = "all files below the folder are read: exclude this one with a pattern" if number == errno.EACCES else ""
    return ScoringError(words, hint=hint)
