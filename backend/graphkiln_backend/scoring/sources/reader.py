"""What every module offers that reads one kind of file, and what all of them need to know."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

from graphkiln_backend.graph.errors import InvalidInput
from graphkiln_backend.scoring.errors import ScoringError
from graphkiln_backend.scoring.rows import Row
from graphkiln_backend.scoring.sources.places import Place
from graphkiln_backend.scoring.sources.storage import StoredFile
from graphkiln_backend.scoring.units import InputRange, Unit

REPEATED = "every row needs an id of its own: remove the repetitions, or name the column of another id by --id-column"


@dataclass(frozen=True, kw_only=True, slots=True)
class Columns:
    """Which columns a run reads.

    Attributes:
        image: Holds the image, or its path; empty to find it.
        id: Names the row; empty for the image's path, or the row's place.
        kept: Are carried along.
    """

    image: str = ""
    id: str = ""
    kept: tuple[str, ...] = ()

    def refuse(self, what: str) -> None:
        """Refuses columns where there are none.

        Raises:
            ScoringError: Some are requested.
        """
        if self != Columns():
            raise ScoringError(f"{what} have no columns", hint="leave out --image-column, --id-column, --keep-columns")

    def check(self, known: Iterable[str], where: str) -> None:
        """Checks names against those that there are.

        Raises:
            ScoringError: There is no such column, or more than one.
        """
        names = list(known)
        for name in filter(None, (self.image, self.id, *self.kept)):
            if name not in names:
                raise ScoringError(f"{where} has no column '{name}'", hint=f"it has {', '.join(names)}")
            if names.count(name) > 1:
                hint = "nobody can say which is meant: rename them"
                raise ScoringError(f"{where} has two columns of one name: '{name}'", hint=hint)


class FileReader(Protocol):
    """Reads one kind of file."""

    def ranges(self, place: Place, files: Iterator[StoredFile], rows: int) -> Iterator[InputRange]:
        """The ranges of files, as `Source.ranges`.

        Args:
            place: The folder that they lie below.
            files: They, with their paths below it.
            rows: About how many rows a range has.
        """
        ...

    def rows(self, unit: Unit) -> Iterator[Row]:
        """The rows of a unit, as `Source.rows`."""
        ...


def refuse_row(reason: str) -> bytes:
    """Stands for `Row.load` of a row of which it is known that it cannot be read.

    Raises:
        InvalidInput: Always, with the reason.
    """
    raise InvalidInput(reason)
