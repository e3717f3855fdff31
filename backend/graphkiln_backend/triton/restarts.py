"""Restarts of the server by cause, as a metric that exactly one instance publishes.

The supervisor has no metrics port: it writes the counts into a file at each start. The instance that holds the lock of
that file's folder publishes them; when it ends, another instance takes over.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from graphkiln_backend.system.closing import Closeable
from graphkiln_backend.system.locks import try_lock
from graphkiln_backend.triton.instance_status import write_whole

RESTARTS_FILE = "restarts.json"  # cause -> restarts since the supervisor began, in the folder of status files


class Counter(Protocol):
    """The part of `pb_utils.Metric` that is used."""

    def increment(self, value: float, /) -> None:
        """Add to the counter."""
        ...


class RestartCounts(Closeable):
    """Publish the counts while this instance holds the lock.

    Args:
        folder: Folder of the status files.
        create: Creates the counter of a cause, which exists as long as it is referenced.
    """

    def __init__(self, folder: Path, create: Callable[[str], Counter]) -> None:
        self._folder = folder
        self._create = create
        self._lock: int | None = None
        self._counters: dict[str, Counter] = {}
        self._published: dict[str, int] = {}

    def publish(self) -> None:
        """Publish new restarts, if no other instance does."""
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
        """Withdraw the metric and leave it to another instance."""
        self._counters.clear()  # before the lock is given up: two owners would be counted together
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _owns(self) -> bool:
        if self._lock is None:
            with suppress(OSError):  # the folder is gone: the server is ending
                descriptor = os.open(self._folder, os.O_RDONLY)
                if try_lock(descriptor):
                    self._lock = descriptor
                else:
                    os.close(descriptor)
        return self._lock is not None


def write_restarts(folder: Path, counts: Mapping[str, int]) -> None:
    """Write the restarts by cause for the instances to publish.

    Raises:
        OSError: It cannot be written.
    """
    write_whole(folder / RESTARTS_FILE, json.dumps(counts).encode())


def read_restarts(folder: Path) -> dict[str, int]:
    """Read the restarts by cause; empty where nothing was written yet."""
    try:
        counts: dict[str, int] = json.loads((folder / RESTARTS_FILE).read_bytes())
    except (OSError, ValueError):
        return {}
    return counts
