"""Silence of others that is our own: this process was suspended, and perhaps the whole machine was."""

from __future__ import annotations

import time

SILENT_S = 20.0
"""What beats or responds once a second has hung when it has not for so long; a busy machine delays it by seconds."""
_SUSPENDED_S = 5.0


class SuspensionDetector:
    """Notices a suspension by the time between two calls, which is about a second otherwise."""

    def __init__(self) -> None:
        self._called_at = time.monotonic()

    def has_resumed(self) -> bool:
        """Whether this process has just gone on after a suspension. To be called regularly."""
        before, self._called_at = self._called_at, time.monotonic()
        return self._called_at - before > _SUSPENDED_S
