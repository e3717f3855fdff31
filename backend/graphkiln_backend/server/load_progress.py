"""How far the models of a starting server are: one row for each version, however many instances it has."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace

from graphkiln_backend.server.load_crashes import find_crashes
from graphkiln_backend.triton.load_crash import Crash
from graphkiln_backend.triton.snapshot import Snapshot


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadProgress:
    """A version that is being loaded, or is ready.

    Attributes:
        model: Model name.
        version: Version number.
        activity: What its slowest instance does; `ready` once all of them are.
        seconds: How long it has been loading, or how long it took.
    """

    model: str
    version: int
    activity: str
    seconds: float

    @property
    def is_ready(self) -> bool:
        """Whether every instance that has begun to load is ready."""
        return self.activity == READY


READY = "ready"


def load_progress(seen: Snapshot) -> list[LoadProgress]:
    """The versions that instances have begun to load, by name and number.

    Args:
        seen: What the instances say.
    """
    now = time.monotonic()
    crashes = find_crashes(seen)
    rows = [
        *(
            LoadProgress(model=s.model, version=s.version, activity=READY, seconds=s.load_ms / 1e3)
            for s in sorted(seen.statuses.values(), key=lambda status: status.load_ms)
        ),
        *(
            LoadProgress(model=s.model, version=s.version, activity=s.activity, seconds=now - s.since)
            for s in sorted(seen.loading.values(), key=lambda loading: -loading.since)
        ),
    ]
    rows = [_with_end(row, crashes) for row in rows]
    slowest = {(row.model, row.version): row for row in rows}
    return [slowest[key] for key in sorted(slowest)]


def _with_end(row: LoadProgress, crashes: Mapping[tuple[str, int], Crash]) -> LoadProgress:
    crash = None if row.is_ready else crashes.get((row.model, row.version))
    return replace(row, activity=crash.what) if crash else row
