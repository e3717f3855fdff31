"""Find repeated row ids among more rows than fit into memory.

Each id becomes a hash of 8 bytes. Hashes are distributed over files by their highest bits, so that equal ones are in
the same file, which is sorted. Since two ids may have the same hash, matches are candidates, to be compared by id.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from graphkiln_backend.scoring.errors import ScoringError
from graphkiln_backend.scoring.scratch import Scratch, scratch_folder
from graphkiln_backend.system.closing import Closeable

Hashes = npt.NDArray[np.uint64]
Ids = Sequence[str] | Sequence[bytes] | Any  # or a chunked array of Arrow

_FILES = 64
_SHIFT = np.uint64(58)  # keeps the bits that index the files
_BUFFERED = 1 << 18  # ids in memory before they are written
_NAMED = 5


class RowHashes(Closeable):
    """Hashes of row ids. Holds 2 MiB in memory, and a 64th of all hashes in `repeated`.

    Args:
        folder: Parent of its temporary files; None for the system's folder of temporary files.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self._stack = ExitStack()
        path = self._stack.enter_context(scratch_folder(Scratch.IDS, folder)).path
        self._files = [self._stack.enter_context((path / str(index)).open("wb")) for index in range(_FILES)]
        self._buffer: list[Hashes] = []
        self._count = 0

    def close(self) -> None:
        """Remove the files."""
        self._stack.close()

    def add(self, ids: Ids) -> None:
        """Add ids, preferably thousands at a time."""
        self._buffer.append(hash_ids(ids))
        self._count += len(ids)
        if self._count >= _BUFFERED:
            self._spill()

    def repeated(self) -> Hashes:
        """Return the hashes that were added more than once, sorted. Call it once, at the end."""
        self._spill()
        repeated = []
        for file in self._files:
            file.close()
            hashes = np.fromfile(file.name, np.uint64)
            hashes.sort()
            repeated.append(np.unique(hashes[1:][hashes[1:] == hashes[:-1]]))
        return np.sort(np.concatenate(repeated))

    def refuse_repeated(self, again: Callable[[], Iterable[str | bytes]], hint: str) -> None:
        """Raise if an id was added more than once. Call it once, at the end.

        Args:
            again: Yields all ids once more; called only if two have the same hash.
            hint: What to do about repeated ids.

        Raises:
            ScoringError: Names the first repeated ids.
        """
        suspects = set(self.repeated().tolist())
        repeated = list(_find_repeated(again(), suspects)) if suspects else []
        if repeated:
            named = ", ".join(
                f"'{one if isinstance(one, str) else one.decode('utf-8', 'backslashreplace')}'"
                for one in repeated[:_NAMED]
            )
            more = ", ..." if len(repeated) > _NAMED else ""
            number = "1 id occurs" if len(repeated) == 1 else f"{len(repeated)} ids occur"
            raise ScoringError(f"{number} more than once: {named}{more}", hint=hint)

    def _spill(self) -> None:
        if not self._buffer:
            return
        hashes = np.sort(np.concatenate(self._buffer))
        self._buffer, self._count = [], 0
        bounds = np.searchsorted(hashes >> _SHIFT, np.arange(_FILES + 1, dtype=np.uint64))
        for file, begin, end in zip(self._files, bounds[:-1], bounds[1:], strict=True):
            hashes[begin:end].tofile(file)


def hash_ids(ids: Ids) -> Hashes:
    """Hash ids. Hashes differ between processes, so that input cannot be crafted to collide."""
    values: Iterable[object] = ids
    if isinstance(ids, pa.ChunkedArray):
        values = ids.to_numpy() if pa.types.is_string(ids.type) else ids.to_pylist()
    return np.fromiter(map(hash, values), np.int64, len(ids)).view(np.uint64)


def _find_repeated(ids: Iterable[str | bytes], suspects: set[int]) -> Iterator[str | bytes]:
    """Yield each repeated id once; memory holds only those whose hash is suspect."""
    seen: dict[str | bytes, bool] = {}
    for one in ids:
        if hash(one) % 2**64 in suspects:
            if seen.get(one) is False:
                yield one
            seen[one] = one in seen
