"""A base class for what holds resources."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Self


class Closeable(ABC):
    """An owner of resources; `close` frees them, and so does the end of a `with` block, however it ends."""

    @abstractmethod
    def close(self) -> None:
        """Free the resources."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
