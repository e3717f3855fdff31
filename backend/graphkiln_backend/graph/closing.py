"""What is closed at the end of a `with` block, however the block ends."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Self


class Closeable(ABC):
    """Something that holds what must be given back: `close` does it, and so does the end of a `with` block."""

    @abstractmethod
    def close(self) -> None:
        """Gives back what is held."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
