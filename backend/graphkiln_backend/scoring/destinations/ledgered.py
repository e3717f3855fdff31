"""Parquet files in an object store that cannot refuse a second put, with a ledger in a database.

The ledger lets one attempt of a unit write at a time, and no other once one has committed. There is one object per
unit, named by its id, so that readers of the folder need not know the ledger: an attempt that dies between its put and
its commit leaves a whole result, which the next attempt writes over.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from graphkiln_backend.scoring.destinations.base import Committed, Lease, Result
from graphkiln_backend.scoring.destinations.database_notes import DatabaseNotes
from graphkiln_backend.scoring.destinations.lease import claim
from graphkiln_backend.scoring.destinations.ledger import Ledger
from graphkiln_backend.scoring.destinations.parquet import ParquetDestination, object_name
from graphkiln_backend.scoring.destinations.parquet_result import encode_result
from graphkiln_backend.scoring.destinations.store import Store


class LedgeredDestination(ParquetDestination):
    """Files of a store, one per row of a ledger.

    Args:
        store: Where the files are; its `create` is not used.
        ledger: Says which of them count.
        notes: Where claims are made.
    """

    def __init__(self, store: Store, ledger: Ledger, notes: DatabaseNotes) -> None:
        super().__init__(store)
        self._ledger, self._notes = ledger, notes

    def prepare(self) -> None:
        """Makes the tables, and probes the store."""
        self._ledger.prepare()
        self._notes.prepare()
        super().prepare()

    def claim(self, run_id: str) -> Lease:
        """A note of the database."""
        return claim(self._notes, run_id)

    def committed_ids(self) -> Iterator[str]:
        """Those of the ledger; files without a row there are of attempts that died."""
        return iter(self._ledger.unit_ids())

    def commit(self, result: Result) -> None:
        """Puts the file while the unit's row in the ledger is held."""
        self._ledger.commit(
            result,
            lambda _, attempt: self._store.replace(object_name(result.unit_id), encode_result(result, attempt)),
        )

    def describe(self, unit_ids: Iterable[str]) -> Iterator[Committed]:
        """The files' footers, which must say what the ledger says."""
        asked = list(unit_ids)
        told = {row.unit_id: row for row in self._ledger.rows(asked)}
        for one in super().describe(asked):
            row = told.get(one.unit_id)
            if one.damage or (row and (row.scored, row.errors) == (one.scored, one.errors)):
                yield one
            else:
                yield Committed(unit_id=one.unit_id, place=one.place, damage="the ledger says something else of it")

    def remove(self, unit_ids: Iterable[str]) -> None:
        """Files first: a row without a file would never be computed again."""
        removed = list(unit_ids)
        self._ledger.remove(removed, lambda _: super(LedgeredDestination, self).remove(removed))
