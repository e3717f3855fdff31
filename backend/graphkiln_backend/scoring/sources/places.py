"""Files by their addresses: paths of this machine or of a shared file system, and objects of buckets."""

from __future__ import annotations

import errno
import fnmatch
import logging
import os
import re
import stat
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from io import SEEK_SET, BufferedIOBase
from pathlib import Path
from typing import Any, BinaryIO, Protocol, TypeVar, cast

from graphkiln_backend.graph.errors import GraphkilnError
from graphkiln_backend.graph.files import GIB, UnusableFile, format_size, open_regular, read_stream
from graphkiln_backend.graph.text import redact
from graphkiln_backend.scoring.errors import InputChanged, ScoringError, SourceUnavailable
from graphkiln_backend.storage.address import RemoteAddress, RemoteStoreError
from graphkiln_backend.storage.objects import ObjectChanged, RemoteObjects

IMAGE_LIMIT = GIB  # most bytes of an encoded image
READABLE = "paths, s3://, gs:// and file:// can"
_OTHER_SCHEME = re.compile(r"(?!s3://|gs://)[a-zA-Z][a-zA-Z0-9+.-]*://")
_WILDCARD = re.compile(r"[*?[]")
_ANY_FOLDERS = "**"
# Faults of the disk, the network or this process rather than of the file.
_PASSING = {errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOTCONN}
_T = TypeVar("_T")
_log = logging.getLogger("graphkiln.scoring")


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredFile:
    """A file or object.

    Attributes:
        path: Below the folder that was listed, or as it was named.
        size: In bytes.
        stamp: Changes with the content; empty for a link that leads nowhere.
    """

    path: str
    size: int
    stamp: str


class Storage(Protocol):
    """Files by their full paths. Its methods may be called by many threads at a time."""

    def walk(self, folder: str) -> Iterator[StoredFile]:
        """All files below a folder, in the order of their paths' bytes, but for hidden ones; none without a folder.

        Raises:
            ScoringError: A folder cannot be listed.
        """
        ...

    def find(self, path: str) -> StoredFile | None:
        """A file; None where there is none, or a folder.

        Raises:
            ScoringError: It cannot be looked at.
        """
        ...

    def read(self, path: str, stamp: str | None, part: tuple[int, int] | None = None) -> bytes:
        """Read an image.

        Args:
            path: The file.
            stamp: What it must still be; None for whatever it is.
            part: Offset and size of what is read of it; None for all.

        Raises:
            InputChanged: It is another one now, or gone.
            SourceUnavailable: It cannot be read just now.
            GraphkilnError: It can never be read, such as one without a permission.
            OSError: Likewise, or it is too large, or there is none.
        """
        ...

    def open(self, path: str, stamp: str | None = None) -> BinaryIO:
        """Open a file of many images, to be read in part.

        Raises:
            InputChanged: It is another one now, or gone.
            ScoringError: It cannot be opened.
        """
        ...


@dataclass(frozen=True, slots=True)
class Place:
    """A path and its storage.

    Attributes:
        path: As the storage names it.
        text: As a user names it.
    """

    storage: Storage
    path: str
    text: str

    def below(self, path: str) -> Place:
        """A path below this one."""
        return Place(self.storage, f"{self.path.rstrip('/')}/{path}", f"{self.text.rstrip('/')}/{path}")

    @property
    def folder(self) -> Place:
        """The folder of a file."""
        return Place(self.storage, self.path.rpartition("/")[0], self.text.rpartition("/")[0])


def locate(text: str) -> Place:
    """Locate a path, `file://` or a bucket's address.

    Raises:
        ScoringError: It is an address of another kind.
        RepositoryError: It is a bucket's address, but incomplete.
    """
    text = text.removeprefix("file://")
    if _OTHER_SCHEME.match(text):
        raise ScoringError(f"'{redact(text)}' cannot be read", hint=READABLE)
    address = RemoteAddress.parse(text)
    if address is None:
        path = os.path.abspath(text)  # noqa: PTH100 - it may hold a pattern
        return Place(LocalStorage(), path, path)
    # Down to its bucket, which credentials may depend on.
    bucket, _, rest = address.root.partition("/")
    service = address.text.removesuffix(f"/{rest}") if rest else address.text or bucket
    return Place(_bucket(address.scheme, tuple(address.options.items()), service), address.root, address.text)


@cache
def _bucket(scheme: str, options: tuple[tuple[str, str], ...], text: str) -> Storage:
    root = text.rpartition("/")[2]
    return ObjectStorage(RemoteAddress(scheme=scheme, root=root, options=dict(options), text=text))


def load_image(folder: Place, text: str) -> bytes:
    """Read an image that a row names by its path, relative to a folder, or by its address.

    Raises:
        SourceUnavailable: It cannot be read just now.
        GraphkilnError: It can never be read.
        OSError: Likewise.
    """
    place = locate(text) if text.startswith("/") or "://" in text else folder.below(text)
    return place.storage.read(place.path, None)


def check_size(size: int) -> None:
    """Refuse an image that no memory should hold, before it is read.

    Raises:
        UnusableFile: It has too many bytes.
    """
    if size > IMAGE_LIMIT:
        raise UnusableFile(f"it has {format_size(size)}, which is more than the {format_size(IMAGE_LIMIT)} of an image")


def is_pattern(path: str) -> bool:
    """True if a path holds wildcards: `*`, `?`, `[a-z]` within a name, `**` for any folders."""
    return _WILDCARD.search(path) is not None


def split_pattern(path: str) -> tuple[str, str]:
    """Split a pattern into the folder above all matches and the pattern below it."""
    parts = path.split("/")
    first = next(index for index, part in enumerate(parts) if is_pattern(part))
    return "/".join(parts[:first]) or "/", "/".join(parts[first:])


class PathPattern:
    """Matches paths below a folder; a last `**` means everything."""

    def __init__(self, pattern: str) -> None:
        parts = pattern.split("/")
        if parts[-1] == _ANY_FOLDERS:
            parts.append("*")
        self._parts = [None if part == _ANY_FOLDERS else re.compile(fnmatch.translate(part)) for part in parts]

    def matches(self, path: str) -> bool:
        """True if a path matches."""
        return _match(path.split("/"), self._parts)


def _match(names: Sequence[str], parts: Sequence[re.Pattern[str] | None]) -> bool:
    if not parts or not names:
        return not parts and not names
    first, *rest = parts
    if first is None:
        return any(_match(names[skipped:], rest) for skipped in range(len(names)))
    return first.match(names[0]) is not None and _match(names[1:], rest)


class OpenedFile(BufferedIOBase):
    """A file whose library's errors become ours, also when Arrow, tarfile or a loop over lines reads it.

    Unexplained, an outage of the network would be taken for a damaged file, or for the doing of a row.

    Args:
        file: As its library opened it; owned.
        explain: What an error of that library means.
    """

    def __init__(self, file: BinaryIO, explain: Callable[[Exception], GraphkilnError]) -> None:
        self._file, self._explain = file, explain

    def read(self, size: int | None = -1, /) -> bytes:
        """Read bytes."""
        return self._explained(lambda: self._file.read(-1 if size is None else size))

    def seek(self, offset: int, whence: int = SEEK_SET, /) -> int:
        """Go to another place."""
        return self._explained(lambda: self._file.seek(offset, whence))

    def tell(self) -> int:
        """The position."""
        return self._explained(self._file.tell)

    def readable(self) -> bool:
        """Always true."""
        return True

    def seekable(self) -> bool:
        """Always true."""
        return True

    def close(self) -> None:
        """Close the library's file, too."""
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
    """Files by absolute paths. Links are followed; a link to a folder that holds it is not, as it would never end."""

    def walk(self, folder: str) -> Iterator[StoredFile]:
        """A folder at a time, its names sorted in memory."""
        try:
            is_there = Path(folder).is_dir()
        except OSError as error:  # a folder above may not be entered
            raise _failure(folder, error) from error
        if is_there:
            yield from _walk(os.fsencode(folder), b"", ())

    def find(self, path: str) -> StoredFile | None:
        """A regular file."""
        try:
            status = Path(path).stat()
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (OSError, ValueError) as error:
            raise ScoringError(f"cannot look at {path}: {error}") from error
        return _described(path, status) if stat.S_ISREG(status.st_mode) else None

    def read(self, path: str, stamp: str | None, part: tuple[int, int] | None = None) -> bytes:
        """Opened, looked at, read, and looked at again."""
        try:
            with open_regular(path, None if part else IMAGE_LIMIT) as file:
                _check(path, file, stamp)
                content = _read_part(file, *part) if part else read_stream(file, IMAGE_LIMIT)
                _check(path, file, stamp)
        except OSError as error:
            if error.errno in _PASSING:
                raise SourceUnavailable(f"cannot read {path}: {error.strerror}") from error
            if error.errno == errno.ENOENT and stamp:
                raise InputChanged(f"{path} is gone since it was planned") from error
            raise
        return content

    def open(self, path: str, stamp: str | None = None) -> BinaryIO:
        """A file as it is now; `find` tells afterwards whether it was replaced meanwhile."""
        try:
            file = open_regular(path)
        except FileNotFoundError as error:
            kind = ScoringError if stamp is None else InputChanged
            raise kind(f"there is no file {path}") from error
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
        status = os.stat(folder)  # noqa: PTH116 - bytes, which no Path holds
        here = status.st_dev, status.st_ino
        if here in above:
            _log.warning("%s leads back to a folder that holds it: it is not followed", os.fsdecode(folder))
            return
        with os.scandir(folder) as entries:
            # Folders end with a slash, so that paths are sorted as a bucket's are.
            names = sorted(
                each.name + b"/" if _is_folder(each) else each.name for each in entries if each.name[:1] != b"."
            )
    except OSError as error:
        raise _failure(os.fsdecode(folder), error) from error
    for name in names:
        if name.endswith(b"/"):
            yield from _walk(folder + b"/" + name[:-1], prefix + name, (*above, here))
        else:
            yield _look_at(folder + b"/" + name, os.fsdecode(prefix + name))


def _is_folder(entry: os.DirEntry[bytes]) -> bool:
    try:
        return entry.is_dir()
    except OSError as error:
        if error.errno == errno.ELOOP:  # a link to itself: its row says so
            return False
        raise


def _look_at(path: bytes, name: str) -> StoredFile:
    try:
        return _described(name, os.stat(path))  # noqa: PTH116
    except OSError as error:
        if error.errno in {errno.ENOENT, errno.ELOOP}:  # a broken link, or it has just gone: its row says so
            return StoredFile(path=name, size=0, stamp="")
        raise _failure(os.fsdecode(path), error) from error


def _described(path: str, status: os.stat_result) -> StoredFile:
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
    hint = "everything below it is input, or a pattern says what is" if number == errno.EACCES else ""
    return ScoringError(words, hint=hint)


class ObjectStorage:
    """The objects of a service of S3 or Google Cloud Storage.

    Raises:
        RepositoryError: The kind of the address is not known.
    """

    def __init__(self, address: RemoteAddress) -> None:
        self._objects = RemoteObjects(address)

    def walk(self, folder: str) -> Iterator[StoredFile]:
        """The objects below a prefix, as the service lists them."""
        prefix = f"{folder.rstrip('/')}/"
        try:
            for found in self._objects.list(prefix):
                path = found.path.removeprefix(prefix)
                if path and not path.endswith("/") and not any(part.startswith(".") for part in path.split("/")):
                    yield StoredFile(path=path, size=found.size, stamp=found.stamp)
        except RemoteStoreError as error:
            raise _translate(error) from error

    def find(self, path: str) -> StoredFile | None:
        """An object."""
        try:
            found = self._objects.describe(path) if "/" in path else None
        except RemoteStoreError as error:
            raise _translate(error) from error
        return StoredFile(path=path, size=found.size, stamp=found.stamp) if found else None

    def read(self, path: str, stamp: str | None, part: tuple[int, int] | None = None) -> bytes:
        """One request."""
        try:
            return self._objects.read(path, IMAGE_LIMIT, stamp or "", part)
        except FileNotFoundError as error:
            if stamp is None:
                raise FileNotFoundError(f"there is no object {path}") from error
            raise InputChanged(f"{path} is gone since it was planned") from error
        except RemoteStoreError as error:
            if error.passing or isinstance(error, ObjectChanged):
                raise _translate(error) from error
            raise

    def open(self, path: str, stamp: str | None = None) -> BinaryIO:
        """A file that asks for ranges; the service refuses them once the object is replaced."""
        if stamp is not None and ((found := self.find(path)) is None or found.stamp != stamp):
            raise InputChanged(f"{path} has changed since it was planned" if found else f"{path} is gone")
        try:
            opened: Any = self._objects.open(path)
        except FileNotFoundError as error:
            raise ScoringError(f"there is no object {path}") from error
        except RemoteStoreError as error:
            raise _translate(error) from error
        return cast("BinaryIO", OpenedFile(opened, lambda error: _translate(self._objects.translate(error, path))))


def _translate(error: RemoteStoreError) -> ScoringError:
    if isinstance(error, ObjectChanged):
        return InputChanged(error.message)
    kind = SourceUnavailable if error.passing else ScoringError
    return kind(error.message, hint=error.hint)
