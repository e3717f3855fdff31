"""Where the seconds of a start go."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager


class Phases:
    """A stopwatch for the phases of a start, which do not overlap.

    Attributes:
        seconds: Of each phase so far, in the order in which they first began.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def measure(self, name: str) -> Iterator[None]:
        """Adds the time that the block takes to a phase, however it ends.

        Args:
            name: Of the phase.
        """
        begun = time.monotonic()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.monotonic() - begun
