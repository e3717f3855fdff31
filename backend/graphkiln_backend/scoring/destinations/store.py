"""Interfaces of stores: a folder, a bucket, or, for notes only, a database table."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol


class Notes(Protocol):
    """Files by name, written atomically. All methods raise `StoreError` if the store fails."""

    def place(self, name: str) -> str:
        """Full path or address of a name, for messages."""
        ...

    def create(self, name: str, content: memoryview) -> bool:
        """Write a content under a new name; only one writer succeeds.

        Args:
            name: The name.
            content: A unique content, by which an attempt with a lost response is recognized.

        Returns:
            True if this content was stored; False if another one exists.
        """
        ...

    def replace(self, name: str, content: memoryview | Path) -> None:
        """Write a content, or that of a file, atomically, replacing any other."""
        ...

    def read(self, name: str) -> bytes | None:
        """Read a content; None if there is none."""
        ...

    def fetch(self, name: str, path: Path) -> bool:
        """Copy a content to a local path; return False if there is none."""
        ...

    def delete(self, name: str) -> None:
        """Delete a content, if there is one."""
        ...

    def age_s(self, name: str) -> float | None:
        """Seconds since a content was written, by the clock of the store; None if there is none."""
        ...


class Store(Notes, Protocol):
    """A folder or a bucket for results and notes."""

    def prepare(self) -> None:
        """Prepare for writing, and check that `create` is exclusive.

        Raises:
            ScoringError: `create` is not exclusive, or the store is not writable.
        """
        ...

    def names(self) -> Iterator[str]:
        """Yield all names except hidden ones, which begin with a dot."""
        ...

    def open(self, name: str) -> Any:
        """Open a content for pyarrow: a path, or a seekable file object.

        Raises:
            OSError: There is no such content.
        """
        ...
