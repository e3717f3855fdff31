"""Interface of sources: ranges for the plan, rows for a worker."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol, TypeVar

from graphkiln_backend.graph.errors import InvalidInput
from graphkiln_backend.scoring.errors import ScoringError
from graphkiln_backend.scoring.messages import InputRange, Row, Unit
from graphkiln_backend.scoring.sources.places import Place, StoredFile

REPEATED = "every row needs its own id: remove the repetitions, or name the column of another id by --id-column"
_T = TypeVar("_T")
_R = TypeVar("_R")


class Source(Protocol):
    """An input. It is opened by its text on the driver and again on each worker, and holds nothing in between.

    Its methods may be called by several threads at a time. What is wrong with a single row is found by that row's
    `load`; what is wrong with the input raises from these.
    """

    def ranges(self, rows: int) -> Iterator[InputRange]:
        """The ranges of the input in a fixed order, streamed: memory must not grow with their number.

        Args:
            rows: About how many rows a range has.

        Raises:
            ScoringError: The input cannot be listed.
        """
        ...

    def rows(self, unit: Unit) -> Iterator[Row]:
        """The rows of a unit, in a fixed order, exactly `unit.rows` of them.

        Raises:
            InputChanged: The input is no longer what was planned.
            SourceUnavailable: The input cannot be read just now.
            ScoringError: The unit cannot be read at all.
        """
        ...


class FileReader(Protocol):
    """Reads one kind of file."""

    def ranges(self, place: Place, files: Iterator[StoredFile], rows: int) -> Iterator[InputRange]:
        """The ranges of files, whose paths begin below `place`; as `Source.ranges`."""
        ...

    def rows(self, unit: Unit) -> Iterator[Row]:
        """The rows of a unit, as `Source.rows`."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Columns:
    """Columns that a run reads.

    Attributes:
        image: Holds the image, or its path; empty to find it.
        id: Names the row; empty for the image's path, or the row's place.
        kept: Are carried along.
    """

    image: str = ""
    id: str = ""
    kept: tuple[str, ...] = ()

    def refuse(self, what: str) -> None:
        """Refuse columns of an input that has none.

        Raises:
            ScoringError: Some are requested.
        """
        if self != Columns():
            raise ScoringError(f"{what} have no columns", hint="leave out --image-column, --id-column, --keep-columns")

    def check(self, known: Iterable[str], where: str) -> None:
        """Check that each is one of the known ones.

        Raises:
            ScoringError: There is no such column, or more than one.
        """
        names = list(known)
        for name in filter(None, (self.image, self.id, *self.kept)):
            if name not in names:
                raise ScoringError(f"{where} has no column '{name}'", hint=f"it has {', '.join(names)}")
            if names.count(name) > 1:
                raise ScoringError(f"{where} has two columns of one name: '{name}'", hint="rename one of them")


def refuse_row(reason: str) -> bytes:
    """Raise, as `Row.load` of a row that is known to be unreadable.

    Raises:
        InvalidInput: Always, with the reason.
    """
    raise InvalidInput(reason)


def map_ahead(function: Callable[[_T], _R], items: Iterable[_T], threads: int = 8) -> Iterator[_R]:
    """Map items on threads, in order; memory holds as many results as there are threads."""
    waiting: deque[Future[_R]] = deque()
    with ThreadPoolExecutor(threads, thread_name_prefix="ahead") as pool:
        try:
            for item in items:
                waiting.append(pool.submit(function, item))
                if len(waiting) > threads:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            for future in waiting:
                future.cancel()
