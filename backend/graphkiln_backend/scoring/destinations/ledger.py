"""Parquet files in an object store that cannot refuse a second put, with a ledger in a database.

The ledger lets one attempt of a unit write at a time, and no other once one has committed. There is one object per
unit, named by its id, so that readers of the folder need not know the ledger: an attempt that dies between its put and
its commit leaves a whole result, which the next attempt writes over.

One bucket has many addresses: a name and a number of its server, a proxy, a tunnel. Which part of the database is the
ledger of a folder is therefore named by the folder itself, in the note `_ledger.json`.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

import psycopg
from psycopg import sql

from graphkiln_backend.scoring.destinations.base import Committed, Result
from graphkiln_backend.scoring.destinations.database import Database, DatabaseNotes
from graphkiln_backend.scoring.destinations.lock import Lock
from graphkiln_backend.scoring.destinations.parquet import LEDGER_NOTE, ParquetDestination, encode_result, object_name
from graphkiln_backend.scoring.destinations.store import Store
from graphkiln_backend.scoring.errors import CommitConflict, ScoringError, StoreError

# The ledger: which units have a result, in a table whose primary key lets one attempt of a unit win. An attempt inserts
# the unit's row and writes the result before it commits; another one waits at the row, is refused when the first
# commits, and goes on when the first dies.

_ATTEMPTS = 5
_PAUSE_S = 0.2
_PIECE = 1000
_TABLES = """
CREATE TABLE IF NOT EXISTS graphkiln_units (
    destination text NOT NULL,
    unit text NOT NULL,
    configuration text NOT NULL,
    scored bigint NOT NULL,
    errors bigint NOT NULL,
    attempt text NOT NULL,
    committed_at timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (destination, unit)
)
"""

Write = Callable[[psycopg.Connection[Any], str], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class LedgerRow:
    """A unit that was committed.

    Attributes:
        configuration: What it was computed by.
        scored: Rows with an answer.
        errors: Rows with an error.
    """

    unit_id: str
    configuration: str
    scored: int
    errors: int


class Ledger:
    """The units of one destination.

    Args:
        database: Where the table `graphkiln_units` is.
        destination: Key of this destination in the table.
    """

    def __init__(self, database: Database, destination: str) -> None:
        self._database, self._destination = database, destination

    def prepare(self) -> None:
        """Make the table."""
        with self._database.making_tables() as connection:
            connection.execute(_TABLES)

    def unit_ids(self) -> list[str]:
        """All units that were committed."""
        with self._database.transaction() as connection:
            if connection.execute("SELECT to_regclass('graphkiln_units')").fetchone() == (None,):
                return []
            query = "SELECT unit FROM graphkiln_units WHERE destination = %s"
            return [unit for (unit,) in connection.execute(query, [self._destination])]

    def rows(self, unit_ids: Iterable[str]) -> Iterator[LedgerRow]:
        """Read the rows of units; those that were not committed are left out."""
        query = (
            "SELECT unit, configuration, scored, errors FROM graphkiln_units WHERE destination = %s AND unit = ANY(%s)"
        )
        waiting = iter(unit_ids)
        while piece := list(islice(waiting, _PIECE)):
            with self._database.transaction() as connection:
                found = connection.execute(query, [self._destination, piece]).fetchall()
            for unit_id, configuration, scored, errors in found:
                yield LedgerRow(unit_id=unit_id, configuration=configuration, scored=scored, errors=errors)

    def compare(self, connection: psycopg.Connection[Any], table: sql.Identifier | None) -> tuple[bool, bool]:
        """Return whether the ledger knows of rows, and whether a table has some, both at one moment."""
        rows = sql.SQL("EXISTS (SELECT FROM {})").format(table) if table else sql.SQL("false")
        known = "EXISTS (SELECT FROM graphkiln_units WHERE destination = %s AND scored + errors > 0)"
        query = sql.SQL("SELECT {}, {}").format(sql.SQL(known), rows)
        told, there = connection.execute(query, [self._destination]).fetchone() or (False, False)
        return told, there

    def commit(self, result: Result, write: Write) -> None:
        """Write a result and its row, both or none; a commit whose answer was lost is looked up.

        Args:
            result: What is committed.
            write: Writes the result, given the connection of the transaction and the name of this attempt; it may be
                called again.

        Raises:
            CommitConflict: The unit has a result already.
            StoreError: The database fails, or what `write` writes to.
            ScoringError: The database refuses the statement.
        """
        attempt = uuid.uuid4().hex
        for number in range(_ATTEMPTS):
            try:
                self._commit(result, write, attempt)
            except StoreError as error:
                if not error.passing or number == _ATTEMPTS - 1:
                    raise
                time.sleep(_PAUSE_S * 2**number)
            else:
                return

    def remove(self, unit_ids: list[str], erase: Callable[[psycopg.Connection[Any]], None]) -> None:
        """Remove units and what `erase` erases, both or none."""
        with self._database.transaction() as connection:
            erase(connection)
            query = "DELETE FROM graphkiln_units WHERE destination = %s AND unit = ANY(%s)"
            connection.execute(query, [self._destination, unit_ids])

    def _commit(self, result: Result, write: Write, attempt: str) -> None:
        row = [self._destination, result.unit_id, result.configuration, len(result.table) - result.errors]
        with self._database.transaction() as connection:
            inserted = connection.execute(
                "INSERT INTO graphkiln_units (destination, unit, configuration, scored, errors, attempt) "
                "VALUES (%s, %s, %s, %s, %s, %s) ON CONFLICT DO NOTHING",
                [*row, result.errors, attempt],
            ).rowcount
            if inserted:
                write(connection, attempt)
                return
            query = "SELECT attempt FROM graphkiln_units WHERE destination = %s AND unit = %s"
            winner = connection.execute(query, [self._destination, result.unit_id]).fetchone()
        if winner != (attempt,):
            raise CommitConflict(f"unit {result.unit_id} has a result already")


class LedgeredDestination(ParquetDestination):
    """Files of a store, one per row of a ledger.

    Args:
        store: Where the files are; its `create` is not used.
        database: Where the ledger says which of them count, and where the lock is.
    """

    has_ledger = True

    def __init__(self, store: Store, database: Database) -> None:
        super().__init__(store)
        self._database, self._name = database, ""

    def prepare(self) -> None:
        """Make the tables, settle which ledger is this folder's, and probe the store.

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

    def lock(self, run_id: str) -> Lock:
        """Take the lock, which is a note of the database: the store may not create exclusively."""
        return Lock(self._notes(self.ledger_name()), run_id)

    def committed_ids(self) -> Iterator[str]:
        """Those of the ledger; files without a row there are of attempts that died."""
        return iter(self._ledger().unit_ids())

    def commit(self, result: Result) -> None:
        """Put the file while the unit's row in the ledger is held."""
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
                yield Committed(
                    unit_id=one.unit_id,
                    place=one.place,
                    damage="row counts in the ledger and in the file footer differ",
                )

    def remove(self, unit_ids: Iterable[str]) -> None:
        """Files first: a row without a file would never be computed again."""
        removed = list(unit_ids)
        self._ledger().remove(removed, lambda _: super(LedgeredDestination, self).remove(removed))

    def ledger_name(self) -> str:
        """Return the name of this folder's part of the ledger; empty where nothing was written yet.

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
        """Write the name, in the database first: what the folder names must exist."""
        content = memoryview(json.dumps({"ledger": name, "database": str(self._database)}).encode())
        self._notes(name).replace(LEDGER_NOTE, content)
        self._store.replace(LEDGER_NOTE, content)

    def _ledger(self) -> Ledger:
        return Ledger(self._database, self.ledger_name())

    def _notes(self, name: str) -> DatabaseNotes:
        return DatabaseNotes(self._database, name, called=self._store.place("").rstrip("/"))
