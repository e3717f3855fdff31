"""Interfaces of what holds files: a folder, a bucket, or, for notes alone, a table of a database."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol


class Notes(Protocol):
    """Files by name. A content appears whole or not at all. All methods raise `StoreError` where the store fails."""

    def place(self, name: str) -> str:
        """The whole path or address of a name, for messages."""
        ...

    def create(self, name: str, content: memoryview) -> bool:
        """Write a content under a new name; of several writers one succeeds.

        Args:
            name: The name.
            content: Unlike any other that is written under it: an attempt whose answer was lost is recognized by it.

        Returns:
            True if this content is there now; False where another one was.
        """
        ...

    def replace(self, name: str, content: memoryview | Path) -> None:
        """Write a content, or that of a file, in one step; it replaces any other."""
        ...

    def read(self, name: str) -> bytes | None:
        """Read a content; None where there is none."""
        ...

    def fetch(self, name: str, path: Path) -> bool:
        """Copy a content to a path of this machine; False where there is none."""
        ...

    def delete(self, name: str) -> None:
        """Remove a content, if there is one."""
        ...

    def age_s(self, name: str) -> float | None:
        """Seconds since a content was written, by the clock of the store alone; None where there is none."""
        ...


class Store(Notes, Protocol):
    """A folder or a bucket, which holds results, too."""

    def prepare(self) -> None:
        """Make it ready to be written, and prove that `create` is exclusive.

        Raises:
            ScoringError: It is not, or nothing can be written.
        """
        ...

    def names(self) -> Iterator[str]:
        """All names but hidden ones, which begin with a dot."""
        ...

    def open(self, name: str) -> Any:
        """Open a content as pyarrow reads it: a path, or a file object that can seek.

        Raises:
            OSError: There is none.
        """
        ...
