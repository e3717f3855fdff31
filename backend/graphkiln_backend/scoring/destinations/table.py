"""A table of a PostgreSQL database: the rows of a unit and its row in the ledger are written in one transaction.

The table has the columns of the results, and before them `unit_id` and `unit_row`, the row's place in its unit. Its
index is unique, so that the database itself refuses a unit's rows a second time, whatever a ledger says.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import psycopg
import pyarrow as pa
from psycopg import sql

from graphkiln_backend.scoring.destinations.base import Committed, Lease, Result
from graphkiln_backend.scoring.destinations.database import Database
from graphkiln_backend.scoring.destinations.database_notes import DatabaseNotes
from graphkiln_backend.scoring.destinations.lease import claim
from graphkiln_backend.scoring.destinations.ledger import Ledger, LedgerRow
from graphkiln_backend.scoring.destinations.sql_types import sql_type, sql_values
from graphkiln_backend.scoring.destinations.table_name import TableName, parse_table, resolve_table
from graphkiln_backend.scoring.errors import ScoringError

_UNIT, _ROW = "unit_id", "unit_row"
_OWN = {_UNIT: "text", _ROW: "integer"}
_PIECE = 1000
_COLUMNS = (
    "SELECT attname, format_type(atttypid, atttypmod) FROM pg_attribute "
    "WHERE attrelid = to_regclass(%s) AND attnum > 0 AND NOT attisdropped"
)


class TableDestination:
    """A table, made by the first result.

    Args:
        database: The database.
        table: Name of the table, `TABLE` or `SCHEMA.TABLE`; see `table_name`.

    Raises:
        ScoringError: It is no name.
    """

    def __init__(self, database: Database, table: str) -> None:
        self._database = database
        self._parts = parse_table(table)
        self._checked: set[tuple[tuple[str, str], ...]] = set()

    @cached_property
    def _name(self) -> TableName:
        """What the server calls the table, whatever the user wrote: two names of one table would have two ledgers."""
        with self._database.transaction() as connection:
            return resolve_table(connection, self._parts)

    @property
    def _table(self) -> sql.Identifier:
        return self._name.identifier

    @cached_property
    def _ledger(self) -> Ledger:
        return Ledger(self._database, f"table {self._name}")

    @cached_property
    def _notes(self) -> DatabaseNotes:
        return DatabaseNotes(self._database, f"table {self._name}")

    def prepare(self) -> None:
        """Makes the tables of the ledger and the notes, and sees that the ledger is this table's."""
        self._ledger.prepare()
        self._notes.prepare()
        self._check_ledger()
        self._checked.clear()

    def claim(self, run_id: str) -> Lease:
        """A note."""
        return claim(self._notes, run_id)

    def committed_ids(self) -> Iterator[str]:
        """Those of the ledger."""
        return iter(self._ledger.unit_ids())

    def commit(self, result: Result) -> None:
        """Copies the rows of a result."""
        columns = {field.name: sql_type(field.type) for field in result.table.schema}
        self._make_table(columns)
        names = sql.SQL(", ").join(map(sql.Identifier, [*_OWN, *columns]))
        statement = sql.SQL("COPY {} ({}) FROM STDIN").format(self._table, names)

        def write(connection: psycopg.Connection[Any], _: str) -> None:
            values = [sql_values(column) for column in result.table.columns]
            try:
                with connection.cursor() as cursor, cursor.copy(statement) as copy:
                    for index, row in enumerate(zip(*values, strict=True)):
                        copy.write_row((result.unit_id, index, *row))
            except psycopg.errors.UniqueViolation as error:
                raise self._strange(f"rows of unit {result.unit_id}") from error

        self._ledger.commit(result, write)

    def describe(self, unit_ids: Iterable[str]) -> Iterator[Committed]:
        """The ledger, beside the rows that are there."""
        piece: list[LedgerRow] = []
        for row in self._ledger.rows(unit_ids):
            piece.append(row)
            if len(piece) == _PIECE:
                yield from self._describe(piece)
                piece = []
        yield from self._describe(piece)

    def read(self, unit_id: str, columns: Sequence[str]) -> pa.Table:
        """Columns of its rows."""
        query = sql.SQL("SELECT {} FROM {} WHERE {} = %s ORDER BY {}").format(
            sql.SQL(", ").join(map(sql.Identifier, columns)),
            self._table,
            sql.Identifier(_UNIT),
            sql.Identifier(_ROW),
        )
        with self._database.transaction() as connection:
            rows = connection.execute(query, [unit_id]).fetchall()
        return pa.table({name: [row[index] for row in rows] for index, name in enumerate(columns)})

    def remove(self, unit_ids: Iterable[str]) -> None:
        """Deletes their rows, all in one transaction."""
        removed = list(unit_ids)

        def erase(connection: psycopg.Connection[Any]) -> None:
            if self._existing(connection):
                query = sql.SQL("DELETE FROM {} WHERE {} = ANY(%s)").format(self._table, sql.Identifier(_UNIT))
                connection.execute(query, [removed])

        self._ledger.remove(removed, erase)

    def write_note(self, name: str, content: bytes | Path) -> None:
        """A row of `graphkiln_notes`."""
        self._notes.replace(name, content if isinstance(content, Path) else memoryview(content))

    def read_note(self, name: str) -> bytes | None:
        """A row of `graphkiln_notes`."""
        return self._notes.read(name)

    def fetch_note(self, name: str, path: Path) -> bool:
        """A row of `graphkiln_notes`."""
        return self._notes.fetch(name, path)

    def _describe(self, rows: Sequence[LedgerRow]) -> Iterator[Committed]:
        query = sql.SQL("SELECT {0}, count(*), count(error) FROM {1} WHERE {0} = ANY(%s) GROUP BY 1")
        if not rows:
            return
        statement = query.format(sql.Identifier(_UNIT), self._table)
        with self._database.transaction() as connection:
            is_there = bool(self._existing(connection))
            found = connection.execute(statement, [[row.unit_id for row in rows]]).fetchall() if is_there else []
        counts = {unit_id: (count - errors, errors) for unit_id, count, errors in found}
        for row in rows:
            scored, errors = counts.get(row.unit_id, (0, 0))
            told = f"the ledger has {row.scored} answers and {row.errors} errors, the table {scored} and {errors}"
            yield Committed(
                unit_id=row.unit_id,
                place=f"{self._database}, table {self._name}",
                configuration=row.configuration,
                scored=row.scored,
                errors=row.errors,
                damage="" if (scored, errors) == (row.scored, row.errors) else told,
            )

    def _make_table(self, columns: dict[str, str]) -> None:
        """Makes the table, or compares its columns; asks the database once for each set of columns."""
        key = tuple(columns.items())
        if key in self._checked:
            return
        if clash := sorted(set(columns) & set(_OWN)):
            raise ScoringError(f"a column may not be called {clash[0]}", hint="leave it out of --keep-columns")
        with self._database.making_tables() as connection:
            existing = self._existing(connection) or self._create(connection, _OWN | columns)
        wrong = {name: kind for name, kind in (_OWN | columns).items() if existing.get(name) != kind}
        if wrong:
            needed = ", ".join(f"{name} {kind} (it is {existing.get(name, 'missing')})" for name, kind in wrong.items())
            raise ScoringError(f"table {self._name} has other columns than the results: {needed}", hint="name another")
        self._checked.add(key)

    def _existing(self, connection: psycopg.Connection[Any]) -> dict[str, str]:
        return dict(connection.execute(_COLUMNS, [self._table.as_string(connection)]).fetchall())

    def _create(self, connection: psycopg.Connection[Any], columns: dict[str, str]) -> dict[str, str]:
        declared = [sql.SQL("{} {}").format(sql.Identifier(name), sql.SQL(kind)) for name, kind in columns.items()]
        connection.execute(sql.SQL("CREATE TABLE {} ({})").format(self._table, sql.SQL(", ").join(declared)))
        connection.execute(
            sql.SQL("CREATE UNIQUE INDEX ON {} ({}, {})").format(self._table, *map(sql.Identifier, _OWN))
        )
        return columns

    def _check_ledger(self) -> None:
        """Compares ledger and table: results that were dropped would never be computed again, others' be doubled."""
        with self._database.transaction() as connection:
            told, there = self._ledger.compare(connection, None)  # first, as a table may appear meanwhile
            if self._existing(connection):
                told, there = self._ledger.compare(connection, self._table)
        if there and not told:
            raise self._strange("rows")
        if told and not there:
            forget = sql.SQL("DELETE FROM graphkiln_units WHERE destination = {}").format(f"table {self._name}")
            raise ScoringError(
                f"the ledger has results of table {self._name}, which is gone or empty",
                hint=f"bring it back, name another table, or forget them: {forget.as_string()}",
            )

    def _strange(self, what: str) -> ScoringError:
        return ScoringError(
            f"table {self._name} holds {what} that its ledger does not know",
            hint="they are of something else, or of a ledger in another schema (search_path): name another table",
        )
