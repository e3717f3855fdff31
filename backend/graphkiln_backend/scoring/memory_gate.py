"""How much may be held at once: bytes, whatever the number of the things that hold them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class MemoryGate:
    """Admits what fits beside what is held. Something larger than the whole is admitted alone.

    Args:
        limit_bytes: Of all that is held together.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._limit = limit_bytes
        self._held = 0
        self._changed = threading.Condition()

    @property
    def held_bytes(self) -> int:
        """What is held now."""
        return self._held

    def acquire(self, size_bytes: int, is_urgent: Callable[[], bool] = lambda: False) -> None:
        """Waits until there is room.

        Args:
            size_bytes: What is to be held.
            is_urgent: Whether it must be admitted in any case, because what is held waits for it. Asked again whenever
                something is released.
        """
        with self._changed:
            self._changed.wait_for(
                lambda: not self._held or self._held + size_bytes <= self._limit or is_urgent(),
            )
            self._held += size_bytes

    def release(self, size_bytes: int) -> None:
        """Gives back what was held; 0 to have everybody who waits look again."""
        with self._changed:
            self._held -= size_bytes
            self._changed.notify_all()

    @contextmanager
    def hold(self, size_bytes: int) -> Iterator[None]:
        """Waits until there is room, and holds it during the block."""
        self.acquire(size_bytes)
        try:
            yield
        finally:
            self.release(size_bytes)
