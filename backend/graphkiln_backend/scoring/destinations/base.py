"""Interface of destinations.

A unit's result is visible whole or not at all, and once: `commit` is one atomic step of the store, and the second
attempt of a unit is refused.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import pyarrow as pa

from graphkiln_backend.scoring.destinations.lock import Lock
from graphkiln_backend.scoring.destinations.store import Notes


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
        place: The file, object or table that holds it, for messages.
        configuration: Digest of what it was computed by.
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


class Destination(ABC):
    """A store of results. It is opened by its text on the driver and again on each worker.

    All methods raise `StoreError` where the store fails.
    """

    @property
    @abstractmethod
    def notes(self) -> Notes:
        """Files beside the results, whose names begin with `_`, such as `_run.json`."""

    def lock(self, run_id: str) -> Lock:
        """Take the lock that keeps other drivers away; called after `prepare`, before the results are listed.

        Raises:
            DestinationBusy: Another run holds it.
        """
        return Lock(self.notes, run_id)

    @abstractmethod
    def prepare(self) -> None:
        """Make it ready for a run, and prove that it can commit as it must.

        Raises:
            ScoringError: It cannot be written, or would lose or double results.
        """

    @abstractmethod
    def committed_ids(self) -> Iterator[str]:
        """List the ids of all units that have a result, once."""

    @abstractmethod
    def commit(self, result: Result) -> None:
        """Make a result visible in one step.

        Raises:
            CommitConflict: The unit has one already.
            ScoringError: The store has no place for such a result, such as a table with other columns.
        """

    @abstractmethod
    def describe(self, unit_ids: Iterable[str]) -> Iterator[Committed]:
        """Describe units that have a result, in any order; `damage` marks those that cannot be read."""

    @abstractmethod
    def read(self, unit_id: str, columns: Sequence[str]) -> pa.Table:
        """Read columns of a unit's result, its rows in their order.

        Raises:
            ScoringError: It cannot be read.
        """

    @abstractmethod
    def remove(self, unit_ids: Iterable[str]) -> None:
        """Remove results; units without one are left out."""
