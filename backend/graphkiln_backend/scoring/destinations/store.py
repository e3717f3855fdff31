"""Interface of stores that can hold results as files: a folder, a bucket, the notes of a database."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol


class Store(Protocol):
    """Names and their contents. A content appears under its name whole or not at all.

    All raise `StoreError` where the store fails.
    """

    def prepare(self) -> None:
        """Make it ready to be written, and prove that `create` is exclusive.

        Raises:
            ScoringError: It is not, or nothing can be written.
        """
        ...

    def place(self, name: str) -> str:
        """The whole path or address of a name, for people."""
        ...

    def names(self, prefix: str = "") -> Iterator[str]:
        """All names that begin with a prefix, but for hidden ones, which begin with a dot."""
        ...

    def create(self, name: str, content: memoryview) -> bool:
        """Write a content under a new name; of several that try, one succeeds.

        Args:
            name: The name.
            content: Unlike any other that is written under it: an attempt whose answer was lost knows its own by that.

        Returns:
            True if this content is there now; False where another one was.
        """
        ...

    def replace(self, name: str, content: memoryview | Path) -> None:
        """Write a content, or that of a file, under a name, in the place of any other."""
        ...

    def read(self, name: str) -> bytes | None:
        """A content, or None where there is none."""
        ...

    def fetch(self, name: str, path: Path) -> bool:
        """Copy a content to a path of this machine; False where there is none."""
        ...

    def open(self, name: str) -> Any:
        """A content as pyarrow reads it: a path, or a file object that can seek.

        Raises:
            OSError: There is none.
        """
        ...

    def delete(self, name: str) -> None:
        """Remove a content, if there is one."""
        ...

    def age_s(self, name: str) -> float | None:
        """Seconds since a content was written, by the clock of the store alone; None where there is none."""
        ...
