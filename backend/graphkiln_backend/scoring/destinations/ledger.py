"""Parquet files in an object store without conditional writes, with a ledger in a database.

The ledger lets one attempt of a unit write at a time, and none after a commit. There is one object per unit, named by
its id, so that readers of the folder do not need the ledger: an attempt that dies between put and commit leaves a
complete result, which the next attempt overwrites.

A bucket may have several addresses (host name, IP address, proxy, tunnel). So the folder itself names its ledger in the
database, in the note `_ledger.json`.
"""

from __future__ import annotations

import json
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
from graphkiln_backend.scoring.errors import CommitConflict, ScoringError

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
    """A committed unit.

    Attributes:
        configuration: Digest of its configuration.
        scored: Rows with a result.
        errors: Rows with an error.
    """

    unit_id: str
    configuration: str
    scored: int
    errors: int


class Ledger:
    """The committed units of a destination: a table with the unit as primary key.

    An attempt inserts the unit's row and writes the result before it commits. A concurrent attempt waits for the row,
    is refused if the first one commits, and continues if it dies.

    Args:
        database: Database of the table `graphkiln_units`.
        destination: Key of this destination in the table.
    """

    def __init__(self, database: Database, destination: str) -> None:
        self._database, self._destination = database, destination

    def prepare(self) -> None:
        """Make the table."""
        with self._database.making_tables() as connection:
            connection.execute(_TABLES)

    def unit_ids(self) -> list[str]:
        """Yield all committed units."""
        with self._database.transaction() as connection:
            if connection.execute("SELECT to_regclass('graphkiln_units')").fetchone() == (None,):
                return []
            query = "SELECT unit FROM graphkiln_units WHERE destination = %s"
            return [unit for (unit,) in connection.execute(query, [self._destination])]

    def rows(self, unit_ids: Iterable[str]) -> Iterator[LedgerRow]:
        """Read the rows of units; uncommitted units are omitted."""
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
        """Return whether the ledger and a table have rows, in one snapshot."""
        rows = sql.SQL("EXISTS (SELECT FROM {})").format(table) if table else sql.SQL("false")
        known = "EXISTS (SELECT FROM graphkiln_units WHERE destination = %s AND scored + errors > 0)"
        query = sql.SQL("SELECT {}, {}").format(sql.SQL(known), rows)
        told, there = connection.execute(query, [self._destination]).fetchone() or (False, False)
        return told, there

    def commit(self, result: Result, write: Write) -> None:
        """Write a result and its row atomically.

        Args:
            result: The result.
            write: Writes the result, given the connection of the transaction and the name of the attempt.

        Raises:
            CommitConflict: The unit is already committed, perhaps by an earlier call whose response was lost.
            StoreError: The database or the store of `write` fails.
            ScoringError: The database refuses the statement.
        """
        attempt = uuid.uuid4().hex
        scored = len(result.table) - result.errors
        with self._database.transaction() as connection:
            inserted = connection.execute(
                "INSERT INTO graphkiln_units (destination, unit, configuration, scored, errors, attempt) "
                "VALUES (%s, %s, %s, %s, %s, %s) ON CONFLICT DO NOTHING",
                [self._destination, result.unit_id, result.configuration, scored, result.errors, attempt],
            ).rowcount
            if not inserted:
                raise CommitConflict(f"unit {result.unit_id} has a result already")
            write(connection, attempt)

    def remove(self, unit_ids: list[str], erase: Callable[[psycopg.Connection[Any]], None]) -> None:
        """Delete units and call `erase` atomically."""
        with self._database.transaction() as connection:
            erase(connection)
            query = "DELETE FROM graphkiln_units WHERE destination = %s AND unit = ANY(%s)"
            connection.execute(query, [self._destination, unit_ids])


class LedgeredDestination(ParquetDestination):
    """Files of a store, one for each row of a ledger.

    Args:
        store: Store of the files; its `create` is not used.
        database: Database of ledger and lock.
    """

    has_ledger = True

    def __init__(self, store: Store, database: Database) -> None:
        super().__init__(store)
        self._database, self._name = database, ""

    def prepare(self) -> None:
        """Create the tables, determine the folder's ledger, and probe the store.

        Raises:
            ScoringError: The folder's ledger is in another database, or as for `ParquetDestination`.
        """
        Ledger(self._database, "").prepare()
        self._notes("").prepare()
        with self._database.making_tables():  # exclusive among programs, for any address of the folder
            if self._store.read(LEDGER_NOTE) is None:
                name = uuid.uuid4().hex
                content = memoryview(json.dumps({"ledger": name, "database": str(self._database)}).encode())
                self._notes(name).replace(LEDGER_NOTE, content)  # first, because the folder refers to it
                self._store.replace(LEDGER_NOTE, content)
        self.ledger_name()
        super().prepare()

    def lock(self, run_id: str) -> Lock:
        """Lock by a note in the database, because the store has no exclusive creation."""
        return Lock(self._notes(self.ledger_name()), run_id)

    def committed_ids(self) -> Iterator[str]:
        """Yield the units of the ledger; files without a row are of dead attempts."""
        return iter(self._ledger().unit_ids())

    def commit(self, result: Result) -> None:
        """Write the file while holding the unit's row in the ledger."""
        self._ledger().commit(
            result,
            lambda _, attempt: self._store.replace(object_name(result.unit_id), encode_result(result, attempt)),
        )

    def describe(self, unit_ids: Iterable[str]) -> Iterator[Committed]:
        """Read the footers of the files, which must match the ledger."""
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
        """Delete files first: a row without a file would never be computed again."""
        removed = list(unit_ids)
        self._ledger().remove(removed, lambda _: super(LedgeredDestination, self).remove(removed))

    def ledger_name(self) -> str:
        """Name of this folder's part of the ledger; empty before the first run.

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

    def _ledger(self) -> Ledger:
        return Ledger(self._database, self.ledger_name())

    def _notes(self, name: str) -> DatabaseNotes:
        return DatabaseNotes(self._database, name, called=self._store.place("").rstrip("/"))
