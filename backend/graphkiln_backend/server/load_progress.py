"""How far the models of a starting server are: one row for each version, however many instances it has."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from graphkiln_backend.server.repository_control import LoadOverride, RepositoryControl, VersionState
from graphkiln_backend.system.processes import is_gone
from graphkiln_backend.triton.instance_status import Crash, describe_crash
from graphkiln_backend.triton.snapshot import Snapshot, read_snapshot

# Versions whose process was killed while it loaded them, in words, wherever Triton only says "not healthy".

# What Triton (24.10) says of an instance that died or was ended.
_UNHEALTHY = re.compile(r"Stub process '[^']*' is not healthy\.?|Stub process is not healthy\.?")


def find_crashes(seen: Snapshot) -> dict[tuple[str, int], Crash]:
    """How processes ended that were to load a version, by model and version: the newest of each.

    Args:
        seen: What the instances say.
    """
    newest = sorted(seen.loading.items(), key=lambda item: item[1].since)
    latest = {(loading.model, loading.version): (key, loading) for key, loading in newest if is_gone(loading.pid)}
    return {which: describe_crash(loading, seen.crashes.get(key, "")) for which, (key, loading) in latest.items()}


def explain(states: Sequence[VersionState], instances: Path) -> list[VersionState]:
    """The rows of the index, with the words of whoever died.

    Args:
        states: As the server lists them.
        instances: Folder of the instances' files.
    """
    if not any(_UNHEALTHY.search(state.reason) for state in states):
        return list(states)
    crashes = find_crashes(read_snapshot(instances))
    return [replace(state, reason=_in_words(state, crashes)) for state in states]


def _in_words(state: VersionState, crashes: Mapping[tuple[str, int], Crash]) -> str:
    words = crashes.get((state.model, int(state.version))) if state.version else None
    return _UNHEALTHY.sub(lambda _: str(words), state.reason) if words else state.reason


@dataclass(frozen=True, slots=True)
class ExplainingControl:
    """A server's repository control whose reasons say what killed an instance.

    Args:
        control: The running server's.
        instances: Folder of the instances' files.
    """

    control: RepositoryControl
    instances: Path

    def index(self) -> list[VersionState]:
        """See `RepositoryControl.index`."""
        return explain(self.control.index(), self.instances)

    def load(self, model: str, timeout_s: float, override: LoadOverride | None = None) -> str:
        """See `RepositoryControl.load`."""
        return self.control.load(model, timeout_s, override)

    def unload(self, model: str) -> None:
        """See `RepositoryControl.unload`."""
        self.control.unload(model)


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
