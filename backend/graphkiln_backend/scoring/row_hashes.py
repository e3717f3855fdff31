"""Finds ids that occur twice among more rows than memory holds.

Each id becomes a hash of 8 bytes; these are spread over files by their highest bits, so that equal ones meet in the
same file, which is sorted. Two ids may have one hash: what is found here are candidates, which the caller looks at
again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from graphkiln_backend.scoring.errors import ScoringError
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
        """Take ids, of any type that has one Python value each."""
        self.add_hashes(hash_ids(ids))

    def add_hashes(self, hashes: Hashes) -> None:
        """Take what `hash_ids` or `hash_values` made of ids."""
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
    """Hash Python values as `hash_ids` does."""
    return np.fromiter(map(hash, values), np.int64, count).view(np.uint64)


# Ids that occur more than once in an input, found by their hashes.

_NAMED = 5

Ids = Iterable[bytes] | Iterable[str]


class Repeats:
    """Looks for ids that occur more than once, among more than memory holds. Use it as a context manager."""

    def __init__(self) -> None:
        self._hashes = RowHashes()

    def __enter__(self) -> Repeats:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._hashes.__exit__(kind, error, trace)

    def add(self, ids: Sequence[bytes] | Sequence[str]) -> None:
        """Note ids, best some thousands at a time."""
        self._hashes.add_hashes(hash_values(ids, len(ids)))

    def check(self, again: Callable[[], Ids], hint: str) -> None:
        """Refuse repeated ids by their names; to be called once, at the end.

        Args:
            again: Gives all ids once more; asked only if two have one hash.
            hint: What to do about repeated ones.

        Raises:
            ScoringError: There are some.
        """
        suspects = set(self._hashes.repeated().tolist())
        repeated = list(_find_repeated(again(), suspects)) if suspects else []
        if repeated:
            named = ", ".join(f"'{_as_text(one)}'" for one in repeated[:_NAMED])
            more = ", ..." if len(repeated) > _NAMED else ""
            number = "1 id occurs" if len(repeated) == 1 else f"{len(repeated)} ids occur"
            raise ScoringError(f"{number} more than once: {named}{more}", hint=hint)


def _find_repeated(ids: Ids, suspects: set[int]) -> Iterator[bytes | str]:
    """Each repeated id once; memory holds those that are suspected."""
    seen: dict[bytes | str, bool] = {}
    for one in ids:
        if hash(one) % 2**64 in suspects:
            if seen.get(one) is False:
                yield one
            seen[one] = one in seen


def _as_text(one: bytes | str) -> str:
    return one if isinstance(one, str) else one.decode("utf-8", "backslashreplace")
