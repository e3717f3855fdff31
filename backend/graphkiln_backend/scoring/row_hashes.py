"""Ids that occur twice, found among more rows than memory holds.

Each id becomes a hash of 8 bytes; these are spread over files by their highest bits, so that equal ones meet in the
same file, which is sorted. Two ids may have one hash: what is found are candidates, which are compared by their names.
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
_SHIFT = np.uint64(58)  # leaves the bits that count to _FILES
_HELD = 1 << 18
_NAMED = 5


class RowHashes(Closeable):
    """The hashes of ids; it holds 2 MiB, and at the end a 64th of all hashes.

    Args:
        folder: Where its files are, which vanish with it; None for the folder of temporary files.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self._stack = ExitStack()
        self._folder = self._stack.enter_context(scratch_folder(Scratch.IDS, folder)).path
        self._files = [self._stack.enter_context((self._folder / str(index)).open("wb")) for index in range(_FILES)]
        self._held: list[Hashes] = []
        self._count = 0

    def close(self) -> None:
        """Remove the files."""
        self._stack.close()

    def add(self, ids: Ids) -> None:
        """Take ids, best some thousands at a time."""
        self._held.append(hash_ids(ids))
        self._count += len(ids)
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

    def refuse_repeated(self, again: Callable[[], Iterable[str | bytes]], hint: str) -> None:
        """Refuse ids that were added more than once; to be called once, at the end.

        Args:
            again: Gives all ids once more; called only if two have one hash.
            hint: What to do about repeated ones.

        Raises:
            ScoringError: There are some; the message names them.
        """
        suspects = set(self.repeated().tolist())
        repeated = list(_find_repeated(again(), suspects)) if suspects else []
        if repeated:
            named = ", ".join(f"'{_as_text(one)}'" for one in repeated[:_NAMED])
            more = ", ..." if len(repeated) > _NAMED else ""
            number = "1 id occurs" if len(repeated) == 1 else f"{len(repeated)} ids occur"
            raise ScoringError(f"{number} more than once: {named}{more}", hint=hint)

    def _spill(self) -> None:
        if not self._held:
            return
        hashes = np.sort(np.concatenate(self._held))
        self._held, self._count = [], 0
        bounds = np.searchsorted(hashes >> _SHIFT, np.arange(_FILES + 1, dtype=np.uint64))
        for file, begin, end in zip(self._files, bounds[:-1], bounds[1:], strict=True):
            hashes[begin:end].tofile(file)


def hash_ids(ids: Ids) -> Hashes:
    """A hash per id; the same within one process alone, where strangers cannot choose ids that collide."""
    values: Iterable[object] = ids
    if isinstance(ids, pa.ChunkedArray):
        values = ids.to_numpy() if pa.types.is_string(ids.type) else ids.to_pylist()
    return np.fromiter(map(hash, values), np.int64, len(ids)).view(np.uint64)


def _find_repeated(ids: Iterable[str | bytes], suspects: set[int]) -> Iterator[str | bytes]:
    """Each repeated id once; memory holds those that are suspected."""
    seen: dict[str | bytes, bool] = {}
    for one in ids:
        if hash(one) % 2**64 in suspects:
            if seen.get(one) is False:
                yield one
            seen[one] = one in seen


def _as_text(one: str | bytes) -> str:
    return one if isinstance(one, str) else one.decode("utf-8", "backslashreplace")
