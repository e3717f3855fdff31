"""How far the models of a starting server are: one row for each version, however many instances it has."""

from __future__ import annotations

import time
from dataclasses import dataclass

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
    slowest = {(row.model, row.version): row for row in rows}
    return [slowest[key] for key in sorted(slowest)]
