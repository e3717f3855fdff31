"""Finds ids that occur twice among more rows than memory holds.

Each id becomes a hash of 8 bytes; these are spread over files by their highest bits, so that equal ones meet in the
same file, which is sorted. Two ids may have one hash: what is found here are candidates, which the caller looks at
again.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from graphkiln_backend.scoring.scratch import Scratch, scratch_folder

Hashes = npt.NDArray[np.uint64]

_FILES = 64
_SHIFT = np.uint64(58)  # leaves the bits that count to _FILES
_HELD = 1 << 18


class RowHashes:
    """The hashes of ids; use it as a context manager. It holds 2 MiB, and at the end a 64th of all hashes.

    Args:
        folder: Where its files are, which vanish with it; None for that of temporary files.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self._stack = ExitStack()
        self._folder = self._stack.enter_context(scratch_folder(Scratch.IDS, folder)).path
        self._files = [self._stack.enter_context((self._folder / str(index)).open("wb")) for index in range(_FILES)]
        self._held: list[Hashes] = []
        self._count = 0

    def __enter__(self) -> RowHashes:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def add(self, ids: pa.ChunkedArray) -> None:
        """Takes ids, of any type that has one Python value each."""
        self.add_hashes(hash_ids(ids))

    def add_hashes(self, hashes: Hashes) -> None:
        """Takes what `hash_ids` or `hash_values` made of ids."""
        self._held.append(hashes)
        self._count += len(hashes)
        if self._count >= _HELD:
            self._spill()

    def repeated(self) -> Hashes:
        """The hashes that were added more than once, sorted; to be called once, at the end."""
        self._spill()
        found = []
        for file in self._files:
            file.close()
            hashes = np.fromfile(file.name, np.uint64)
            hashes.sort()
            found.append(np.unique(hashes[1:][hashes[1:] == hashes[:-1]]))
        return np.sort(np.concatenate(found))

    def _spill(self) -> None:
        if not self._held:
            return
        hashes = np.sort(np.concatenate(self._held))
        self._held, self._count = [], 0
        bounds = np.searchsorted(hashes >> _SHIFT, np.arange(_FILES + 1, dtype=np.uint64))
        for file, begin, end in zip(self._files, bounds[:-1], bounds[1:], strict=True):
            hashes[begin:end].tofile(file)


def hash_ids(ids: pa.ChunkedArray) -> Hashes:
    """A hash per id; the same within one process alone, where strangers cannot choose ids that collide."""
    values: Iterable[object] = ids.to_numpy() if pa.types.is_string(ids.type) else ids.to_pylist()
    return hash_values(values, len(ids))


def hash_values(values: Iterable[object], count: int) -> Hashes:
    """As `hash_ids`, of Python's values."""
    return np.fromiter(map(hash, values), np.int64, count).view(np.uint64)
