"""One deadline for a whole call, however many attempts it takes."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Self


@dataclass(kw_only=True, slots=True)
class Deadline:
    """A point in time.

    Attributes:
        timeout_s: Seconds that were given.
        at: When they are over, on the clock of `time.monotonic()`.
    """

    timeout_s: float
    at: float

    @classmethod
    def after(cls, timeout_s: float) -> Self:
        """The deadline `timeout_s` seconds from now."""
        return cls(timeout_s=timeout_s, at=time.monotonic() + timeout_s)

    @property
    def remaining_s(self) -> float:
        """Seconds left; 0 when the time is over."""
        return max(self.at - time.monotonic(), 0.0)
