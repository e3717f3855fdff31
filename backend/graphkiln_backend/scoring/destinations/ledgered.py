"""Parquet files in an object store that cannot refuse a second put, with a ledger in a database.

The ledger lets one attempt of a unit write at a time, and no other once one has committed. There is one object per
unit, named by its id, so that readers of the folder need not know the ledger: an attempt that dies between its put and
its commit leaves a whole result, which the next attempt writes over.

One bucket has many addresses: a name and a number of its server, a proxy, a tunnel. Which part of the database is the
ledger of a folder is therefore told by the folder itself, in the note `_ledger.json`.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterable, Iterator

from graphkiln_backend.scoring.destinations.base import Committed, Result
from graphkiln_backend.scoring.destinations.database import Database, DatabaseNotes
from graphkiln_backend.scoring.destinations.ledger import Ledger
from graphkiln_backend.scoring.destinations.lock import Lock
from graphkiln_backend.scoring.destinations.parquet import LEDGER_NOTE, ParquetDestination, encode_result, object_name
from graphkiln_backend.scoring.destinations.store import Store
from graphkiln_backend.scoring.errors import ScoringError


class LedgeredDestination(ParquetDestination):
    """Files of a store, one per row of a ledger.

    Args:
        store: Where the files are; its `create` is not used.
        database: Where the ledger says which of them count, and where claims are made.
    """

    has_ledger = True

    def __init__(self, store: Store, database: Database) -> None:
        super().__init__(store)
        self._database, self._name = database, ""

    def prepare(self) -> None:
        """Makes the tables, settles which ledger is this folder's, and probes the store.

        Raises:
            ScoringError: The folder's ledger is in another database, or as of `ParquetDestination`.
        """
        Ledger(self._database, "").prepare()
        self._notes("").prepare()
        with self._database.making_tables():  # by one program at a time, whatever it calls the folder
            if self._store.read(LEDGER_NOTE) is None:
                self._write_name(uuid.uuid4().hex)
        self.ledger_name()
        super().prepare()

    def claim(self, run_id: str) -> Lock:
        """A note of the database."""
        return Lock(self._notes(self.ledger_name()), run_id)

    def committed_ids(self) -> Iterator[str]:
        """Those of the ledger; files without a row there are of attempts that died."""
        return iter(self._ledger().unit_ids())

    def commit(self, result: Result) -> None:
        """Puts the file while the unit's row in the ledger is held."""
        self._ledger().commit(
            result,
            lambda _, attempt: self._store.replace(object_name(result.unit_id), encode_result(result, attempt)),
        )

    def describe(self, unit_ids: Iterable[str]) -> Iterator[Committed]:
        """The files' footers, which must say what the ledger says."""
        asked = list(unit_ids)
        told = {row.unit_id: row for row in self._ledger().rows(asked)}
        for one in super().describe(asked):
            row = told.get(one.unit_id)
            if one.damage or (row and (row.scored, row.errors) == (one.scored, one.errors)):
                yield one
            else:
                yield Committed(unit_id=one.unit_id, place=one.place, damage="the ledger says something else of it")

    def remove(self, unit_ids: Iterable[str]) -> None:
        """Files first: a row without a file would never be computed again."""
        removed = list(unit_ids)
        self._ledger().remove(removed, lambda _: super(LedgeredDestination, self).remove(removed))

    def ledger_name(self) -> str:
        """What this folder's part of the ledger is called; empty where nothing was written yet.

        Raises:
            ScoringError: The folder's ledger is in another database.
        """
        if not self._name and (content := self._store.read(LEDGER_NOTE)):
            told = json.loads(content)
            if self._notes(told["ledger"]).read(LEDGER_NOTE) is None:
                raise ScoringError(
                    f"the ledger of {self._store.place('')} is in {told['database']}, not in {self._database}",
                    hint="name that one with --ledger, or another --out",
                )
            self._name = told["ledger"]
        return self._name

    def _write_name(self, name: str) -> None:
        """In the database first: what the folder says is there."""
        content = memoryview(json.dumps({"ledger": name, "database": str(self._database)}).encode())
        self._notes(name).replace(LEDGER_NOTE, content)
        self._store.replace(LEDGER_NOTE, content)

    def _ledger(self) -> Ledger:
        return Ledger(self._database, self.ledger_name())

    def _notes(self, name: str) -> DatabaseNotes:
        return DatabaseNotes(self._database, name, called=self._store.place("").rstrip("/"))
