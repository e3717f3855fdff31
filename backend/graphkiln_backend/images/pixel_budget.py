"""How much memory the images take that a process decodes at the same time: what is over the budget waits.

A file of half a megabyte may hold an image of 178 million pixels, which take 700 MB each while they are decoded, and as
much again while they are turned or converted. As many at once as there are threads would be more than a machine has.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class PixelBudget:
    """Lets so many pixels be in memory at once. Thread-safe.

    Args:
        pixels: How many. An image that has more waits until it is the only one.
    """

    def __init__(self, pixels: int) -> None:
        self._pixels = self._free = pixels
        self._changed = threading.Condition()

    @contextmanager
    def take(self, pixels: int) -> Iterator[None]:
        """Waits until there is room for an image, and holds it."""
        taken = min(pixels, self._pixels)
        with self._changed:
            self._changed.wait_for(lambda: taken <= self._free)
            self._free -= taken
        try:
            yield
        finally:
            with self._changed:
                self._free += taken
                self._changed.notify_all()
