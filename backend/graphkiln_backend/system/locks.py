"""Locks on files and folders. The kernel takes them away from a process that dies. Source: flock(2)."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, TypeAlias

File: TypeAlias = "int | IO[Any]"  # a descriptor, or an open file; the lock is held until it is closed


def lock(file: File) -> None:
    """Lock a file for this process alone; wait as long as another holds a lock on it.

    Raises:
        OSError: Its file system has no locks.
    """
    fcntl.flock(file, fcntl.LOCK_EX)


def try_lock(file: File) -> bool:
    """Lock a file for this process alone, without waiting; False where another holds a lock on it.

    Raises:
        OSError: Its file system has no locks.
    """
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def lock_shared(file: File) -> None:
    """Lock a file together with others: none of them can take it alone.

    Raises:
        OSError: Its file system has no locks.
    """
    fcntl.flock(file, fcntl.LOCK_SH)


@contextmanager
def locked(path: Path, flags: int = os.O_RDONLY) -> Iterator[bool]:
    """Try to lock a file or folder for this process alone until the end of the block.

    Args:
        path: The file or folder.
        flags: How to open it, as for `os.open`.

    Yields:
        Whether it is locked; False where another holds a lock on it.

    Raises:
        OSError: It cannot be opened, or its file system has no locks.
    """
    descriptor = os.open(path, flags | os.O_CLOEXEC, 0o644)
    try:
        yield try_lock(descriptor)
    finally:
        os.close(descriptor)
