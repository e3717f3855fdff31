"""Locks on files. The kernel takes them away from a process that dies. Source: flock(2)."""

from __future__ import annotations

import fcntl
import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

_log = logging.getLogger("graphkiln.cache")

_LONG_S = 10.0
"""Of waiting for a lock; loading a small model takes less."""


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


def wait_for_lock(file: IO[str], complaint: str, long_s: float = _LONG_S) -> None:
    """Locks a file; as long as another process holds it, waits.

    Args:
        file: Open for writing.
        complaint: Is logged, once, where it takes long: a process that was stopped, or a container that was paused,
            keeps its locks.
        long_s: How long that is, in seconds.

    Raises:
        OSError: Its file system has no locks.
    """
    with suppress(BlockingIOError):
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return
    timer = threading.Timer(long_s, _log.info, (complaint,))
    timer.daemon = True
    timer.start()
    try:
        fcntl.flock(file, fcntl.LOCK_EX)
    finally:
        timer.cancel()
