"""What is left of a budget, and what a measurement takes of it: its own seconds, and the server that it starts.

How long a start and a warm-up take is learned from those that were made, at the slowest of the last few: on a busy
machine a start takes many times what the measurement does.
"""

from __future__ import annotations

import math
from collections import deque

from graphkiln.tuning.candidate import Candidate

_REMEMBERED = 3
_GUESS_S, _WARMUP_S = 5.0, 1.0  # of a start and of a warm-up, before there was one
# Share of the budget that is kept for the confirmation, and seconds that it takes at least beside a start.
_CONFIRMING, _CONFIRMED_S = 0.2, 8.0


def _last_few() -> deque[float]:
    return deque(maxlen=_REMEMBERED)


class Budget:
    """Seconds that measurements may take.

    Args:
        total_s: All of them.
    """

    def __init__(self, total_s: float) -> None:
        self.total_s, self.spent_s = total_s, 0.0
        self._served: Candidate | None = None
        self._starts, self._warmups, self._probes = _last_few(), _last_few(), _last_few()
        self._longest: dict[str, float] = {}

    @property
    def left_s(self) -> float:
        """What is left; below 0 where it was overrun."""
        return self.total_s - self.spent_s

    @property
    def searching_s(self) -> float:
        """What is left for all but the confirmation."""
        if math.isinf(self.total_s):
            return self.left_s
        return self.left_s - max(_CONFIRMING * self.total_s, self.start_s + _CONFIRMED_S)

    @property
    def start_s(self) -> float:
        """What a measurement takes beside its own seconds where another candidate is served."""
        return max(self._starts, default=_GUESS_S)

    @property
    def probe_s(self) -> float:
        """What a bare session takes; 0 before there was one."""
        return max(self._probes, default=0.0)

    def serves(self, candidate: Candidate) -> bool:
        """Whether a server of the candidate runs: the measurement before was of it."""
        return candidate == self._served

    def needed_s(self, candidate: Candidate, seconds: float) -> float:
        """What a measurement of so many seconds takes."""
        return seconds + (max(self._warmups, default=_WARMUP_S) if self.serves(candidate) else self.start_s)

    def affords(self, candidate: Candidate, seconds: float) -> bool:
        """Whether a measurement fits before the time that is kept for the confirmation."""
        return self.needed_s(candidate, seconds) <= self.searching_s

    @property
    def longest(self) -> str:
        """What took longest beside what was to be measured, to go on a sentence with; empty where there was nothing."""
        what = max(self._longest, key=lambda each: self._longest[each], default="")
        return f": {what.format(self._longest[what])}" if what else ""

    def _note(self, what: str, took_s: float) -> None:
        self._longest[what] = max(took_s, self._longest.get(what, 0.0))

    def take_probe(self, took_s: float) -> None:
        """A bare session was timed: whichever server ran was stopped for it."""
        self.spent_s += took_s
        self._served = None
        self._probes.append(took_s)
        self._note("a session takes {:.0f} s to be built and timed", took_s)

    def take(self, candidate: Candidate, seconds: float, took_s: float, *, failed: bool = False) -> None:
        """A measurement of so many seconds was made, which took longer than that."""
        self.spent_s += took_s
        beside_s = max(0.0, took_s - seconds)
        if failed:
            self._note("a candidate that failed took {:.0f} s", took_s)
        else:
            if not self.serves(candidate):
                self._note("a server takes {:.0f} s to start", beside_s)
            (self._warmups if self.serves(candidate) else self._starts).append(beside_s)
        self._served = None if failed else candidate
