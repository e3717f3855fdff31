"""How often the supervisor restarted the server, and why, as a metric that exactly one instance publishes.

The supervisor itself has no metrics port, and the counts of a server that died went with it: it writes them into a file
at each start. Of all instances the one that has locked the folder of that file publishes them; when it ends, another
one does.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from graphkiln_backend.system.closing import Closeable
from graphkiln_backend.triton.instance_status import write_whole

RESTARTS_FILE = "restarts.json"  # cause -> restarts since the supervisor began, in the folder of status files


class Counter(Protocol):
    """What is used of a `pb_utils.Metric`."""

    def increment(self, value: float, /) -> None:
        """Adds to it."""
        ...


class RestartCounts(Closeable):
    """Publishes the counts while this instance is the one to do it.

    Args:
        folder: Of status files.
        create: Makes the counter of a cause; it lives as long as it is referenced.
    """

    def __init__(self, folder: Path, create: Callable[[str], Counter]) -> None:
        self._folder = folder
        self._create = create
        self._lock: int | None = None
        self._counters: dict[str, Counter] = {}
        self._published: dict[str, int] = {}

    def publish(self) -> None:
        """Publishes what is new, if no other instance does."""
        if not self._owns():
            return
        for cause, count in read_restarts(self._folder).items():
            if cause not in self._counters:
                self._counters[cause] = self._create(cause)
            new = count - self._published.get(cause, 0)
            if new > 0:
                self._counters[cause].increment(new)
                self._published[cause] = count

    def close(self) -> None:
        """Withdraws the metric and leaves it to another instance."""
        self._counters.clear()  # before the lock is given up: two owners would be counted together
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _owns(self) -> bool:
        if self._lock is None:
            with suppress(OSError):  # held by another, or the folder is gone: the server is ending
                self._lock = _lock_folder(self._folder)
        return self._lock is not None


def _lock_folder(folder: Path) -> int:
    """Locks a folder until the returned descriptor is closed, also by the end of the process.

    Raises:
        OSError: It is locked, or gone.
    """
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def write_restarts(folder: Path, counts: Mapping[str, int]) -> None:
    """Tells the instances how often the server was restarted.

    Args:
        folder: Of status files.
        counts: By cause, since the supervisor began.

    Raises:
        OSError: It cannot be written.
    """
    write_whole(folder / RESTARTS_FILE, json.dumps(counts).encode())


def read_restarts(folder: Path) -> dict[str, int]:
    """Restarts by cause; none where nothing was written yet.

    Args:
        folder: Of status files.
    """
    try:
        counts: dict[str, int] = json.loads((folder / RESTARTS_FILE).read_bytes())
    except (OSError, ValueError):
        return {}
    return counts
