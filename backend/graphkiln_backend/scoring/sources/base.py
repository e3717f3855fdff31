"""Interface of sources: ranges for the plan, rows for workers."""

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
    """An input, opened by its text on the driver and on each worker. Thread-safe.

    Errors of a single row are raised by its `load`; errors of the input by these methods.
    """

    def ranges(self, rows: int) -> Iterator[InputRange]:
        """Yield the ranges of the input in a fixed order; memory must not grow with their number.

        Args:
            rows: Approximate number of rows of a range.

        Raises:
            ScoringError: The input cannot be listed.
        """
        ...

    def rows(self, unit: Unit) -> Iterator[Row]:
        """Yield the rows of a unit in a fixed order, exactly `unit.rows` of them.

        Raises:
            InputChanged: The input changed since it was planned.
            SourceUnavailable: A temporary I/O or network error.
            ScoringError: The unit cannot be read.
        """
        ...


class FileReader(Protocol):
    """Reader of one kind of file."""

    def ranges(self, place: Place, files: Iterator[StoredFile], rows: int) -> Iterator[InputRange]:
        """Yield the ranges of files below `place`, like `Source.ranges`."""
        ...

    def rows(self, unit: Unit) -> Iterator[Row]:
        """Yield the rows of a unit, like `Source.rows`."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Columns:
    """Columns of a run.

    Attributes:
        image: Column of the image or its path; empty to detect it.
        id: Column of row ids; empty for the image's path, or the row's position.
        kept: Columns copied to the results.
    """

    image: str = ""
    id: str = ""
    kept: tuple[str, ...] = ()

    def refuse(self, what: str) -> None:
        """Refuse columns for an input without columns.

        Raises:
            ScoringError: Columns are requested.
        """
        if self != Columns():
            raise ScoringError(f"{what} have no columns", hint="leave out --image-column, --id-column, --keep-columns")

    def check(self, known: Iterable[str], where: str) -> None:
        """Check that each column exists.

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
    """Raise an error, as `Row.load` of an unreadable row.

    Raises:
        InvalidInput: Always, with the reason.
    """
    raise InvalidInput(reason)


def map_ahead(function: Callable[[_T], _R], items: Iterable[_T], threads: int = 8) -> Iterator[_R]:
    """Map items in threads, in order, with at most one pending result per thread."""
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
