"""Reads files that come from outside: regular files only, and no more of them than their kind may hold.

A pipe or a device in the place of a file would hang its reader or fill its memory. Opening one does no harm here: it is
opened without waiting, looked at, and closed.
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

# Manifests, configurations and labels: a thousand times what the largest model needs.
TEXT_LIMIT = 64 * MIB
# A graph without its weights. Source: Protocol Buffers, "Total Size of Serialized Messages".
GRAPH_LIMIT = 2 * GIB

_KINDS = {
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


class UnusableFile(OSError):
    """Something that is no regular file, or one that is larger than its kind may be; `str` is the reason alone."""

    def __init__(self, reason: str) -> None:
        super().__init__(errno.EINVAL, reason)

    def __str__(self) -> str:
        return str(self.strerror)


def open_regular(path: str | Path, limit_bytes: int | None = None) -> BufferedReader:
    """Open a regular file for reading.

    Args:
        path: The file; links are followed.
        limit_bytes: Largest size; None for any.

    Raises:
        UnusableFile: It is something else, or larger.
        OSError: It cannot be opened.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
    except ValueError as error:  # a null character in its name
        raise UnusableFile(f"it has no valid name: {error}") from error
    except OSError as error:
        if error.errno == errno.ENXIO:  # what opening a socket returns
            raise UnusableFile("it is a socket, expected a regular file") from error
        raise
    try:
        _check(os.fstat(descriptor), limit_bytes)
    except BaseException:
        os.close(descriptor)
        raise
    return os.fdopen(descriptor, "rb")


def read_bytes(path: str | Path, limit_bytes: int) -> bytes:
    """Read a regular file, also one that says that it is empty, as those of /proc do.

    Args:
        path: The file; links are followed.
        limit_bytes: Largest size.

    Raises:
        UnusableFile: It is something else, or larger.
        OSError: It cannot be read.
    """
    with open_regular(path, limit_bytes) as file:
        return read_stream(file, limit_bytes)


def read_stream(stream: BinaryIO, limit_bytes: int) -> bytes:
    """Read a stream, such as standard input, to its end.

    Args:
        stream: What to read.
        limit_bytes: Most bytes.

    Raises:
        UnusableFile: It holds more.
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
        limit_bytes: Largest size.

    Raises:
        UnusableFile: It is something else, or larger.
        OSError: It cannot be read.
        UnicodeDecodeError: It is not UTF-8.
    """
    return read_bytes(path, limit_bytes).decode()


def stamp_of(path: Path) -> tuple[int, ...]:
    """Identity of a file's content: device, inode, size and times; empty where there is no file."""
    with suppress(OSError):
        status = path.stat()
        return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns
    return ()


def can_others_read(path: Path) -> bool:
    """Return true where other users can read a file.

    In a pod, a Secret is root's, and its group is how the pod reads it. Source: Kubernetes, `fsGroup`.

    Raises:
        OSError: It cannot be examined.
    """
    status = path.stat()
    group = stat.S_IRWXG if status.st_uid == os.geteuid() else 0
    return bool(status.st_mode & (group | stat.S_IRWXO))


def format_size(count: int) -> str:
    """A limit in words: `64 MiB`."""
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
