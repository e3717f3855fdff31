"""How often the supervisor looks at the processes: what looking at hundreds costs must not slow down their start."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

POLL_S = 0.02
WATCH_S = 0.5
"""How often the set of instances is read anew; the death of a known one is seen at once."""
_REST = 19.0
"""Looking takes a twentieth of a core at most: while models load, each core has enough to do."""
_LONGEST_REST_S = 1.0


class Waiting(Protocol):
    """What waits for processes: see `StopSignals.wait`."""

    def wait(self, processes: Sequence[int], timeout_s: float) -> None:
        """Sleeps until one of the processes ends, a signal comes, or the time is over."""


@dataclass(slots=True)
class Pace:
    """The time between two looks: of this thread's processor time, so that a busy machine delays nothing further."""

    _woke_at_s: float = field(default_factory=time.thread_time)

    def wait(self, signals: Waiting, processes: Sequence[int], *, live: bool) -> None:
        """Waits for the next look.

        Args:
            signals: Waits.
            processes: Whose end is seen at once.
            live: Whether the server takes requests; until then it is looked at often.
        """
        looked_s = time.thread_time() - self._woke_at_s
        signals.wait(processes, max(WATCH_S if live else POLL_S, min(_REST * looked_s, _LONGEST_REST_S)))
        self._woke_at_s = time.thread_time()
