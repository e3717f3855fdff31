"""Ids that occur more than once in an input, found by their hashes and told by their names."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from types import TracebackType

from graphkiln_backend.scoring.errors import ScoringError
from graphkiln_backend.scoring.row_hashes import RowHashes, hash_values

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
        """Notes ids, best some thousands at a time."""
        self._hashes.add_hashes(hash_values(ids, len(ids)))

    def check(self, again: Callable[[], Ids], hint: str) -> None:
        """Refuses repeated ids by their names; to be called once, at the end.

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
