"""Which units have a result, in a table of a database: its primary key lets one attempt of a unit win.

An attempt inserts the unit's row and writes the result before it commits. Another attempt of the unit waits at the row
meanwhile; it is refused when the first commits, and goes on when the first dies.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

import psycopg
from psycopg import sql

from graphkiln_backend.scoring.destinations.base import Result
from graphkiln_backend.scoring.destinations.database import Database
from graphkiln_backend.scoring.errors import CommitConflict, StoreError

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
        unit_id: Of the unit.
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
        destination: Tells this destination from the others in it.
    """

    def __init__(self, database: Database, destination: str) -> None:
        self._database, self._destination = database, destination

    def prepare(self) -> None:
        """Makes the table."""
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
        """What is known of units; those that were not committed are left out."""
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
        """Whether the ledger knows of rows, and whether a table has some, both at one moment."""
        rows = sql.SQL("EXISTS (SELECT FROM {})").format(table) if table else sql.SQL("false")
        known = "EXISTS (SELECT FROM graphkiln_units WHERE destination = %s AND scored + errors > 0)"
        query = sql.SQL("SELECT {}, {}").format(sql.SQL(known), rows)
        told, there = connection.execute(query, [self._destination]).fetchone() or (False, False)
        return told, there

    def commit(self, result: Result, write: Write) -> None:
        """Writes a result and its row, both or none; a commit whose answer was lost is looked up.

        Args:
            result: What is committed.
            write: Writes the result, given the connection of the transaction and the name of this attempt; it may be
                called again.

        Raises:
            CommitConflict: The unit has a result already.
            StoreError: The database fails, or what `write` writes to.
            ScoringError: The database refuses what it is told.
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
        """Removes units and what `erase` erases, both or none."""
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
