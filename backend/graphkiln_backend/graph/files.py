"""Read external files: regular files only, with a size limit.

A pipe or device instead of a file could block the reader or fill the memory. Files are opened without blocking and
checked first.
"""

from __future__ import annotations

import errno
import os
import stat
from contextlib import suppress
from io import BufferedReader
from pathlib import Path
from typing import BinaryIO

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30

# For manifests, configurations and labels: a thousand times the largest model's.
TEXT_LIMIT = 64 * MIB
# For a graph without weights. Source: Protocol Buffers, "Total Size of Serialized Messages".
GRAPH_LIMIT = 2 * GIB

_KINDS = {
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


class UnusableFile(OSError):
    """Not a regular file, or larger than the limit; `str` is the reason only."""

    def __init__(self, reason: str) -> None:
        super().__init__(errno.EINVAL, reason)

    def __str__(self) -> str:
        return str(self.strerror)


def open_regular(path: str | Path, limit_bytes: int | None = None) -> BufferedReader:
    """Open a regular file for reading.

    Args:
        path: The file; links are followed.
        limit_bytes: Maximum size; None for no limit.

    Raises:
        UnusableFile: It is not a regular file, or too large.
        OSError: It cannot be opened.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
    except ValueError as error:  # a null character in the name
        raise UnusableFile(f"it has no valid name: {error}") from error
    except OSError as error:
        if error.errno == errno.ENXIO:  # the error of opening a socket
            raise UnusableFile("it is a socket, expected a regular file") from error
        raise
    try:
        _check(os.fstat(descriptor), limit_bytes)
    except BaseException:
        os.close(descriptor)
        raise
    return os.fdopen(descriptor, "rb")


def read_bytes(path: str | Path, limit_bytes: int) -> bytes:
    """Read a regular file, including files of /proc, which report size 0.

    Args:
        path: The file; links are followed.
        limit_bytes: Maximum size.

    Raises:
        UnusableFile: It is not a regular file, or too large.
        OSError: It cannot be read.
    """
    with open_regular(path, limit_bytes) as file:
        return read_stream(file, limit_bytes)


def read_stream(stream: BinaryIO, limit_bytes: int) -> bytes:
    """Read a stream, such as standard input, to its end.

    Args:
        stream: The stream.
        limit_bytes: Maximum size.

    Raises:
        UnusableFile: It is longer.
        OSError: It cannot be read.
    """
    content = stream.read(limit_bytes + 1)
    if len(content) > limit_bytes:
        raise UnusableFile(_too_large("it is", limit_bytes))
    return content


def read_text(path: str | Path, limit_bytes: int = TEXT_LIMIT) -> str:
    """Read a regular file of UTF-8 text.

    Args:
        path: The file; links are followed.
        limit_bytes: Maximum size.

    Raises:
        UnusableFile: It is not a regular file, or too large.
        OSError: It cannot be read.
        UnicodeDecodeError: It is not UTF-8.
    """
    return read_bytes(path, limit_bytes).decode()


def stamp_of(path: Path) -> tuple[int, ...]:
    """Stamp of a file's content: device, inode, size and times; empty if there is no file."""
    with suppress(OSError):
        status = path.stat()
        return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns
    return ()


def can_others_read(path: Path) -> bool:
    """True if other users can read a file.

    In a pod, a Secret belongs to root and is read by its group. Source: Kubernetes, `fsGroup`.

    Raises:
        OSError: Its status cannot be read.
    """
    status = path.stat()
    group = stat.S_IRWXG if status.st_uid == os.geteuid() else 0
    return bool(status.st_mode & (group | stat.S_IRWXO))


def format_size(count: int) -> str:
    """Format a size: `64 MiB`."""
    for unit, name in ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if count >= unit:
            return f"{count / unit:.4g} {name}"
    return f"{count} bytes"


def _check(status: os.stat_result, limit_bytes: int | None) -> None:
    if stat.S_ISDIR(status.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    if not stat.S_ISREG(status.st_mode):
        kind = _KINDS.get(stat.S_IFMT(status.st_mode), "something else")
        raise UnusableFile(f"it is {kind}, expected a regular file")
    if limit_bytes is not None and status.st_size > limit_bytes:
        raise UnusableFile(_too_large(f"it has {format_size(status.st_size)}, which is", limit_bytes))


def _too_large(what: str, limit_bytes: int) -> str:
    return f"{what} more than the {format_size(limit_bytes)} that such a file may have"
