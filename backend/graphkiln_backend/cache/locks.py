"""Locks on files. The kernel takes them away from a process that dies. Source: flock(2)."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def locked_alone(path: Path, mode: str) -> Iterator[bool]:
    """Tries to lock a file, without waiting.

    Args:
        path: The file.
        mode: How to open it.

    Yields:
        Whether nobody else holds a lock on it; nobody can take one until the end of the block.
    """
    with path.open(mode) as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        else:
            yield True
