"""Advisory locks on files and folders; the kernel releases those of a process that dies. Source: flock(2).

Each function raises `OSError` if the file system does not support locks.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, TypeAlias

File: TypeAlias = "int | IO[Any]"  # a descriptor or an open file; closing it releases the lock


def lock(file: File) -> None:
    """Take an exclusive lock, waiting for other holders."""
    fcntl.flock(file, fcntl.LOCK_EX)


def try_lock(file: File) -> bool:
    """Take an exclusive lock without waiting; return False if another process holds one."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def lock_shared(file: File) -> None:
    """Take a shared lock, which excludes exclusive locks only."""
    fcntl.flock(file, fcntl.LOCK_SH)


@contextmanager
def locked(path: Path, flags: int = os.O_RDONLY) -> Iterator[bool]:
    """Try to lock a file or folder exclusively until the end of the block.

    Args:
        path: The file or folder.
        flags: Flags of `os.open`.

    Yields:
        True if the lock was taken, False if another process holds one.
    """
    descriptor = os.open(path, flags | os.O_CLOEXEC, 0o644)
    try:
        yield try_lock(descriptor)
    finally:
        os.close(descriptor)
