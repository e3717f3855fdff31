"""How long a worker may be silent before it hangs, from how fast units are computed."""

from __future__ import annotations

from collections import deque

FLOOR_S = 60.0
"""No worker hangs before: a store may take its time to answer a read, and retries it."""
FIRST_S = 600.0
"""Until a unit was measured: the first batch may compile kernels."""
_FACTOR = 3.0
_REMEMBERED = 50


class Patience:
    """Seconds without progress after which a worker is ended.

    A worker makes progress with each row that it begins and with each stage of a unit that it ends, so that a slow unit
    is none that hangs. Three times as long as the slowest of the last units took as a whole, and a minute at least.
    """

    def __init__(self) -> None:
        self._seconds: deque[float] = deque(maxlen=_REMEMBERED)

    def learn(self, seconds: float) -> None:
        """A unit was computed in so many seconds."""
        self._seconds.append(seconds)

    @property
    def seconds(self) -> float:
        """The limit now."""
        return max(FLOOR_S, _FACTOR * max(self._seconds)) if self._seconds else FIRST_S

    @property
    def typical_s(self) -> float | None:
        """The median of the last units; None before there is any."""
        ordered = sorted(self._seconds)
        return ordered[len(ordered) // 2] if ordered else None
