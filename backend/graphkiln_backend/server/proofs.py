"""Results of proofs through a server, for metrics and tables."""

from __future__ import annotations

import threading
from collections.abc import Collection
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class ProofState:
    """Proof of a version.

    Attributes:
        model: Model name.
        version: Version number.
        backend: Name of the backend.
        seat: `python` for an instance of graphkiln (for metrics only: it proves itself), `native` for a graph that
            `serve` gave to Triton's C++ backend, empty for a model of another backend.
        instances: Number of its instances in the native seat.
        device: Device of these instances, such as `cpu`.
        proven: Whether its golden samples were right at the last time; false if it has none.
        error: Relative L2 error of the last right answers; -1 without any.
        replays: Replays on the serving server.
        failures: Replays that failed.
        last_right_at: When they were last right, in seconds since 1970; 0 for never.
    """

    model: str
    version: int
    backend: str
    seat: str
    proven: bool
    error: float = -1.0
    replays: int = 0
    failures: int = 0
    last_right_at: float = 0.0
    instances: int = 0
    device: str = ""


class ProofBook:
    """The results of all versions; thread-safe, kept across restarts of the server."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._states: dict[tuple[str, int], ProofState] = {}

    def record(self, state: ProofState) -> None:
        """Record the newest result of a version."""
        with self._lock:
            self._states[state.model, state.version] = state

    def find(self, model: str, version: int) -> ProofState | None:
        """Return the newest result of a version, or None."""
        with self._lock:
            return self._states.get((model, version))

    def keep(self, model: str, versions: Collection[int]) -> None:
        """Remove the versions of a model that are not served any more."""
        with self._lock:
            for key in [key for key in self._states if key[0] == model and key[1] not in versions]:
                del self._states[key]

    def rows(self) -> tuple[ProofState, ...]:
        """Return the newest result of each version."""
        with self._lock:
            return tuple(self._states.values())
