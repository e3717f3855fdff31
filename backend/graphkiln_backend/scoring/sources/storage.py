"""Where files lie: on this machine, or in a bucket. Both are listed in order, and read as they were when listed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO, Protocol

from graphkiln_backend.graph.files import GIB, UnusableFile, format_size

IMAGE_LIMIT = GIB  # most bytes of an encoded image


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredFile:
    """A file or object.

    Attributes:
        path: Below what was listed, or as it was named.
        size: In bytes.
        stamp: Changes with the content; empty for a link that leads nowhere.
    """

    path: str
    size: int
    stamp: str


def check_size(size: int) -> None:
    """Refuses an image that no memory should hold, before it is read.

    Raises:
        UnusableFile: It has too many bytes.
    """
    if size > IMAGE_LIMIT:
        raise UnusableFile(f"it has {format_size(size)}, which is more than the {format_size(IMAGE_LIMIT)} of an image")


class Storage(Protocol):
    """Files by their full paths. Its methods may be called by many threads at a time."""

    def walk(self, folder: str) -> Iterator[StoredFile]:
        """All files below a folder, in the order of their paths' bytes, but for hidden ones; none without a folder.

        Raises:
            ScoringError: A folder cannot be listed.
        """
        ...

    def find(self, path: str) -> StoredFile | None:
        """A file, or None where there is none, or a folder.

        Raises:
            ScoringError: It cannot be told.
        """
        ...

    def read(self, path: str, stamp: str | None, part: tuple[int, int] | None = None) -> bytes:
        """Reads an image.

        Args:
            path: The file.
            stamp: What it must still be; None for whatever it is.
            part: Offset and size of what is read of it; None for all.

        Raises:
            InputChanged: It is another one now, or gone.
            SourceUnavailable: It cannot be read just now.
            GraphkilnError: It can never be read, such as one without a permission.
            OSError: Likewise, or it is too large, or there is none.
        """
        ...

    def open(self, path: str, stamp: str | None = None) -> BinaryIO:
        """Opens a file of many images, to be read in part.

        Raises:
            InputChanged: It is another one now, or gone.
            ScoringError: It cannot be opened.
        """
        ...
