"""Interface of destinations.

A unit's result is visible completely or not at all, and exactly once: `commit` is atomic, and a second attempt is
refused.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import pyarrow as pa

from graphkiln_backend.scoring.destinations.lock import Lock
from graphkiln_backend.scoring.destinations.store import Notes


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """The result of a unit.

    Attributes:
        configuration: Digest of the model and everything else that affects results.
        table: One row for each row of the unit, in order; either `error` or the other columns are set.
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
    """A committed unit.

    Attributes:
        place: File, object or table of the result, for messages.
        configuration: Digest of its configuration.
        scored: Rows with a result.
        errors: Rows with an error.
        damage: Why the result is unreadable or invalid; empty if it is valid. The counts are 0 if it is not.
    """

    unit_id: str
    place: str
    configuration: str = ""
    scored: int = 0
    errors: int = 0
    damage: str = ""


class Destination(ABC):
    """A store of results, opened by its text on the driver and on each worker.

    All methods raise `StoreError` if the store fails.
    """

    @property
    @abstractmethod
    def notes(self) -> Notes:
        """Files beside the results with names that begin with `_`, such as `_run.json`."""

    def lock(self, run_id: str) -> Lock:
        """Lock the destination against other drivers; called after `prepare`, before the results are listed.

        Raises:
            DestinationBusy: Another run holds it.
        """
        return Lock(self.notes, run_id)

    @property
    def exists(self) -> bool:
        """False if there is nothing yet, not even notes; not all destinations know."""
        return True

    def declare(self, columns: Callable[[], pa.Schema]) -> None:  # noqa: B027 - only some need it
        """Declare the columns of the results, before `prepare`; workers do not.

        Args:
            columns: Finds them out, at some cost.
        """

    @abstractmethod
    def prepare(self) -> None:
        """Prepare for a run, and check that commits are atomic and exclusive.

        Raises:
            ScoringError: The destination is not writable, or its commits are not exclusive.
        """

    @abstractmethod
    def committed_ids(self) -> Iterator[str]:
        """Yield the ids of all committed units."""

    def visible_ids(self) -> Iterator[str]:
        """Yield the ids of units that readers see: all committed ones, unless the run publishes them at its end."""
        return self.committed_ids()

    @abstractmethod
    def commit(self, result: Result) -> None:
        """Commit a result atomically.

        Raises:
            CommitConflict: The unit is already committed.
            ScoringError: The result does not match the store, for example a table with other columns.
        """

    @abstractmethod
    def describe(self, unit_ids: Iterable[str]) -> Iterator[Committed]:
        """Describe committed units, in any order; `damage` marks unreadable ones."""

    @abstractmethod
    def read(self, unit_id: str, columns: Sequence[str]) -> pa.Table:
        """Read columns of a unit's result, with rows in order.

        Raises:
            ScoringError: The result cannot be read.
        """

    @abstractmethod
    def remove(self, unit_ids: Iterable[str]) -> None:
        """Delete results; uncommitted units are ignored."""

    def publish(self, unit_ids: Iterable[str], check: Callable[[], None]) -> None:  # noqa: B027 - as `declare`
        """Make the results of all planned units visible, and no others, if commits alone do not.

        Args:
            unit_ids: All planned units, which are committed.
            check: Raises if the lock is lost; called before each step.

        Raises:
            ScoringError: They cannot be published; repeating the call is safe.
        """

    def unpublished(self) -> str:
        """Say which results are committed, but not visible; empty if there are none."""
        return ""
