"""Interfaces of destinations.

A unit's result is visible whole or not at all, and once: `commit` is one atomic step of the store, and the second
attempt of a unit is refused. Beside the results there are notes, whose names begin with `_`, and
the lock of the run that is writing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import pyarrow as pa

from graphkiln_backend.scoring.destinations.lock import Lock


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """The answers of a unit.

    Attributes:
        configuration: Digest of the model and of all that changes an answer.
        table: A row per row of the unit, in its order; `error` is null where the others are not.
    """

    unit_id: str
    configuration: str
    table: pa.Table

    @property
    def errors(self) -> int:
        """Rows with an error."""
        return int(len(self.table) - self.table.column("error").null_count)


@dataclass(frozen=True, kw_only=True, slots=True)
class Committed:
    """A unit that has a result, as the store keeps it.

    Attributes:
        place: The file, object or table that holds it, for people.
        configuration: What it was computed by.
        scored: Rows with an answer.
        errors: Rows with an error.
        damage: Why it cannot be read or believed; empty where it can. The counts are 0 then.
    """

    unit_id: str
    place: str
    configuration: str = ""
    scored: int = 0
    errors: int = 0
    damage: str = ""


class Destination(Protocol):
    """A store of results. It is opened by its text on the driver and again on each worker."""

    def prepare(self) -> None:
        """Make it ready for a run, and prove that it can commit as it must.

        Raises:
            ScoringError: It cannot be written, or would lose or double results.
        """
        ...

    def claim(self, run_id: str) -> Lock:
        """Take the lock, which keeps other drivers away.

        Called after `prepare`, by a driver, before it reads what is committed.

        Args:
            run_id: What the run is called in messages.

        Raises:
            DestinationBusy: Another run holds it.
            StoreError: The store cannot be written.
        """
        ...

    def committed_ids(self) -> Iterator[str]:
        """The ids of all units that have a result, by listing once."""
        ...

    def commit(self, result: Result) -> None:
        """Make a result visible in one step.

        Raises:
            CommitConflict: The unit has one already.
            StoreError: The store cannot be written.
            ScoringError: The store has no place for such a result, such as a table with other columns.
        """
        ...

    def describe(self, unit_ids: Iterable[str]) -> Iterator[Committed]:
        """Describe units that have a result, in any order; `damage` marks those that cannot be read.

        Raises:
            StoreError: The store cannot be read at all.
        """
        ...

    def read(self, unit_id: str, columns: Sequence[str]) -> pa.Table:
        """Columns of a unit's result, its rows in their order.

        Raises:
            ScoringError: It cannot be read.
        """
        ...

    def remove(self, unit_ids: Iterable[str]) -> None:
        """Remove results; units without one are left out.

        Raises:
            StoreError: The store cannot be written.
        """
        ...

    def write_note(self, name: str, content: bytes | Path) -> None:
        """Write a file beside the results in one step; it replaces an older one.

        Args:
            name: Begins with `_`, such as `_run.json`.
            content: Its bytes, or a file that holds them.

        Raises:
            StoreError: The store cannot be written.
        """
        ...

    def read_note(self, name: str) -> bytes | None:
        """A file beside the results, or None where there is none.

        Raises:
            StoreError: The store cannot be read.
        """
        ...

    def fetch_note(self, name: str, path: Path) -> bool:
        """Copy a file beside the results to a path of this machine; False where there is none.

        Raises:
            StoreError: The store cannot be read.
        """
        ...
