"""A base class for objects that hold resources."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Self


class Closeable(ABC):
    """Context manager that calls `close` at the end of its block."""

    @abstractmethod
    def close(self) -> None:
        """Free the resources."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
