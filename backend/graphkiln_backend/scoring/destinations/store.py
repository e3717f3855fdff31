"""What a place of files must offer to hold results: a folder, or a bucket of an object store."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol


class Store(Protocol):
    """Names and their contents. A content appears under its name whole or not at all.

    All raise `StoreError` where the store fails.
    """

    def prepare(self) -> None:
        """Makes it ready to be written, and proves that `create` is exclusive.

        Raises:
            ScoringError: It is not, or nothing can be written.
        """
        ...

    def place(self, name: str) -> str:
        """What a name is called by people: its whole path or address."""
        ...

    def names(self, prefix: str = "") -> Iterator[str]:
        """All names that begin with a prefix, but for hidden ones, which begin with a dot."""
        ...

    def create(self, name: str, content: memoryview) -> bool:
        """Writes a content under a new name; of several that try, one succeeds.

        Args:
            name: The name.
            content: Unlike any other that is written under it: an attempt whose answer was lost knows its own by that.

        Returns:
            Whether this content stands there now; False where another one did.
        """
        ...

    def replace(self, name: str, content: memoryview | Path) -> None:
        """Writes a content, or that of a file, under a name, in the place of any other."""
        ...

    def read(self, name: str) -> bytes | None:
        """A content, or None where there is none."""
        ...

    def fetch(self, name: str, path: Path) -> bool:
        """Copies a content to a path of this machine; False where there is none."""
        ...

    def open(self, name: str) -> Any:
        """A content as pyarrow reads it: a path, or a file object that can seek.

        Raises:
            OSError: There is none.
        """
        ...

    def delete(self, name: str) -> None:
        """Removes a content, if there is one."""
        ...

    def age_s(self, name: str) -> float | None:
        """Seconds since a content was written, by the clock of the store alone; None where there is none."""
        ...
