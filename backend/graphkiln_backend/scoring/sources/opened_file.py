"""A file of a storage: whoever reads it, Arrow, tarfile or a loop over lines, gets what goes wrong in our words.

Libraries of services raise what they like in the middle of a read. Unexplained, an outage of the network would be
taken for a damaged file, or for the doing of a row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from io import SEEK_SET, BufferedIOBase
from typing import BinaryIO

from graphkiln_backend.graph.errors import GraphkilnError


class OpenedFile(BufferedIOBase):
    """A file that is open for reading.

    Args:
        file: As its library opened it; owned.
        explain: What an error of that library means.
    """

    def __init__(self, file: BinaryIO, explain: Callable[[Exception], GraphkilnError]) -> None:
        self._file, self._explain = file, explain

    def read(self, size: int | None = -1, /) -> bytes:
        """Bytes from where it stands."""
        with self._explained():
            return self._file.read(-1 if size is None else size)

    def seek(self, offset: int, whence: int = SEEK_SET, /) -> int:
        """Goes to another place."""
        with self._explained():
            return self._file.seek(offset, whence)

    def tell(self) -> int:
        """Where it stands."""
        with self._explained():
            return self._file.tell()

    def readable(self) -> bool:
        """It is."""
        return True

    def seekable(self) -> bool:
        """It is."""
        return True

    def close(self) -> None:
        """Closes the library's file, too."""
        try:
            self._file.close()
        finally:
            super().close()

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except GraphkilnError:
            raise
        except Exception as error:
            raise self._explain(error) from error
