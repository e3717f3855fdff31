"""Versions whose process was killed while it loaded them, in words, wherever Triton only says "not healthy"."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from graphkiln_backend.server.repository_control import LoadOverride, RepositoryControl, VersionState
from graphkiln_backend.system.processes import is_gone
from graphkiln_backend.triton.load_crash import Crash, describe_crash
from graphkiln_backend.triton.snapshot import Snapshot, read_snapshot

_UNHEALTHY = re.compile(r"Stub process '[^']*' is not healthy\.?|Stub process is not healthy\.?")
"""What Triton (24.10) says of an instance that died or was ended."""


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
