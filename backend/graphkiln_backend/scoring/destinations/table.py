"""PostgreSQL tables: the rows of a unit and its ledger row are written in one transaction.

The table has `unit_id`, `unit_row` (the row's position in its unit) and the columns of the results. Its index is
unique, so that the database refuses a unit's rows a second time, independent of the ledger.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import psycopg
import pyarrow as pa
from psycopg import sql
from psycopg.types.json import Jsonb

from graphkiln_backend.scoring.destinations.base import Committed, Destination, Result
from graphkiln_backend.scoring.destinations.database import Database, DatabaseNotes
from graphkiln_backend.scoring.destinations.ledger import Ledger, LedgerRow
from graphkiln_backend.scoring.errors import ScoringError

# Names of tables: ledger and lock are stored under the resolved name of a table, independent of the user's notation.
#
# Names are case-sensitive; a part with characters other than letters, digits, `_` and `$` needs double quotes, as in
# SQL: `sales."2024.q1"`.

_PLAIN = r"[\w$]+"
_PART = rf'(?:{_PLAIN}|"(?:[^"\0]|"")+")'
_NAME = re.compile(rf"(?:({_PART})\.)?({_PART})")
_LONGEST = 63  # maximum bytes of a name; the server truncates longer ones. Source: NAMEDATALEN.
_FOUND = (
    "SELECT nspname, relname FROM pg_class JOIN pg_namespace ON pg_namespace.oid = relnamespace "
    "WHERE pg_class.oid = to_regclass(%s)"
)


@dataclass(frozen=True, slots=True)
class TableName:
    """A resolved table name.

    Attributes:
        table: Name of the table.
    """

    schema: str
    table: str

    @property
    def identifier(self) -> sql.Identifier:
        """The table in SQL."""
        return sql.Identifier(self.schema, self.table)

    def __str__(self) -> str:
        return f"{_quoted(self.schema)}.{_quoted(self.table)}"


def parse_table(text: str) -> tuple[str, ...]:
    """Split a table's name into the table, or the schema and the table.

    Args:
        text: `TABLE` or `SCHEMA.TABLE`.

    Raises:
        ScoringError: The name is malformed.
    """
    found = _NAME.fullmatch(text)
    parts = tuple(_unquoted(part) for part in found.groups() if part) if found else ()
    if not parts or any(len(part.encode()) > _LONGEST for part in parts):
        raise ScoringError(
            f"'{text}' names no table" if text else "the destination names no table",
            hint=f'postgresql://USER@HOST/DATABASE?table=NAME, SCHEMA.NAME or "NAME", of {_LONGEST} bytes at most',
        )
    return parts


def resolve_table(connection: psycopg.Connection[Any], parts: tuple[str, ...]) -> TableName:
    """Resolve a name to an existing table, or to the one that it would create.

    Args:
        connection: Connection whose search path applies without a schema.
        parts: Parts of the name.

    Raises:
        ScoringError: Neither a schema is named nor one of the search path exists.
    """
    found = connection.execute(_FOUND, [sql.Identifier(*parts).as_string(connection)]).fetchone()
    schema, table = found or (*_schema_of(connection, parts), parts[-1])
    return TableName(schema, table)


def _schema_of(connection: psycopg.Connection[Any], parts: tuple[str, ...]) -> tuple[str]:
    row = connection.execute("SELECT current_schema()").fetchone()
    schema = parts[0] if len(parts) > 1 else row and row[0]
    if not schema:
        raise ScoringError("the search_path of this user has no schema that is there", hint="?table=SCHEMA.NAME")
    return (schema,)


def _unquoted(part: str) -> str:
    return part[1:-1].replace('""', '"') if part.startswith('"') else part


def _quoted(part: str) -> str:
    return part if re.fullmatch(_PLAIN, part) else '"' + part.replace('"', '""') + '"'


# Conversion of Arrow's types and values to PostgreSQL's.

_SCALARS: tuple[tuple[Callable[[pa.DataType], bool], str], ...] = (
    (pa.types.is_null, "text"),
    (pa.types.is_string, "text"),
    (pa.types.is_large_string, "text"),
    (pa.types.is_boolean, "boolean"),
    (pa.types.is_int8, "smallint"),
    (pa.types.is_uint8, "smallint"),
    (pa.types.is_int16, "smallint"),
    (pa.types.is_uint16, "integer"),
    (pa.types.is_int32, "integer"),
    (pa.types.is_uint32, "bigint"),
    (pa.types.is_int64, "bigint"),
    (pa.types.is_uint64, "numeric"),
    (pa.types.is_decimal, "numeric"),
    (pa.types.is_float16, "real"),
    (pa.types.is_float32, "real"),
    (pa.types.is_float64, "double precision"),
    (pa.types.is_string_view, "text"),
    (pa.types.is_binary, "bytea"),
    (pa.types.is_large_binary, "bytea"),
    (pa.types.is_binary_view, "bytea"),
    (pa.types.is_fixed_size_binary, "bytea"),
    (pa.types.is_date, "date"),
    (pa.types.is_time, "time without time zone"),
    (pa.types.is_duration, "interval"),
)


_NULL = r"\x00"  # replaces null characters, which PostgreSQL's text does not support
_COARSER = {pa.time64("ns"): pa.time64("us"), pa.duration("ns"): pa.duration("us")}


def sql_type(kind: pa.DataType) -> str:
    """PostgreSQL type of a column; `jsonb` for structs and lists of lists."""
    if pa.types.is_dictionary(kind):
        return sql_type(kind.value_type)
    if pa.types.is_timestamp(kind):
        return "timestamp with time zone" if kind.tz else "timestamp without time zone"
    if _is_list(kind):
        inner = sql_type(kind.value_type)
        return "jsonb" if inner == "jsonb" or inner.endswith("[]") else f"{inner}[]"
    return next((name for is_kind, name in _SCALARS if is_kind(kind)), "jsonb")


def sql_values(column: pa.ChunkedArray) -> list[Any]:
    """Values of a column, one per row; times are rounded to microseconds."""
    values: list[Any] = _in_microseconds(column).to_pylist()
    match sql_type(column.type):
        case "jsonb":
            return [None if value is None else Jsonb(value, dumps=_as_json) for value in values]
        case "text" | "text[]":
            return list(map(_holdable, values))
        case _:
            return values


def _in_microseconds(column: pa.ChunkedArray) -> pa.ChunkedArray:
    kind = _COARSER.get(column.type)
    if pa.types.is_timestamp(column.type):
        kind = pa.timestamp("us", column.type.tz)
    return column.cast(kind, safe=False) if kind else column


def _as_json(value: Any) -> str:
    """Convert to JSON: bytes become PostgreSQL's hexadecimal notation, other unsupported values text."""
    try:
        text = json.dumps(value, default=_as_text, allow_nan=False)
    except ValueError:  # for NaN and infinities
        text = ""
    return text if text and "\\u0000" not in text else json.dumps(_holdable(value), default=_as_text)


def _as_text(value: Any) -> str:
    return f"\\x{value.hex()}" if isinstance(value, bytes) else str(value)


def _holdable(value: Any) -> Any:
    """Replace values that the server does not support: null characters, and in JSON NaN and infinities."""
    match value:
        case str():
            return value.replace("\0", _NULL)
        case float() if not math.isfinite(value):
            return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
        case list() | tuple():
            return [_holdable(each) for each in value]
        case dict():
            return {_holdable(name): _holdable(each) for name, each in value.items()}
        case _:
            return value


def _is_list(kind: pa.DataType) -> bool:
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind))


_UNIT, _ROW = "unit_id", "unit_row"
_OWN = {_UNIT: "text", _ROW: "integer"}
_PIECE = 1000
_COLUMNS = (
    "SELECT attname, format_type(atttypid, atttypmod) FROM pg_attribute "
    "WHERE attrelid = to_regclass(%s) AND attnum > 0 AND NOT attisdropped"
)


class TableDestination(Destination):
    """A table, created by the first result.

    Args:
        database: The database.
        table: Name of the table, `TABLE` or `SCHEMA.TABLE`.

    Raises:
        ScoringError: The name is malformed.
    """

    def __init__(self, database: Database, table: str) -> None:
        self._database = database
        self._parts = parse_table(table)
        self._checked: set[tuple[tuple[str, str], ...]] = set()

    @cached_property
    def _name(self) -> TableName:
        """Resolved name of the table, so that two notations share one ledger."""
        with self._database.transaction() as connection:
            return resolve_table(connection, self._parts)

    @property
    def _table(self) -> sql.Identifier:
        return self._name.identifier

    @cached_property
    def _ledger(self) -> Ledger:
        return Ledger(self._database, f"table {self._name}")

    @cached_property
    def notes(self) -> DatabaseNotes:
        """Rows of `graphkiln_notes`."""
        return DatabaseNotes(self._database, f"table {self._name}")

    def prepare(self) -> None:
        """Create the tables of ledger and notes, and check that the ledger belongs to this table."""
        self._ledger.prepare()
        self.notes.prepare()
        self._check_ledger()
        self._checked.clear()

    def committed_ids(self) -> Iterator[str]:
        """Yield the units of the ledger."""
        return iter(self._ledger.unit_ids())

    def commit(self, result: Result) -> None:
        """Insert the rows of a result."""
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
        """Compare the ledger with the table's rows."""
        piece: list[LedgerRow] = []
        for row in self._ledger.rows(unit_ids):
            piece.append(row)
            if len(piece) == _PIECE:
                yield from self._describe(piece)
                piece = []
        yield from self._describe(piece)

    def read(self, unit_id: str, columns: Sequence[str]) -> pa.Table:
        """Read columns of the unit's rows."""
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
        """Delete the rows in one transaction."""
        removed = list(unit_ids)

        def erase(connection: psycopg.Connection[Any]) -> None:
            if self._existing(connection):
                query = sql.SQL("DELETE FROM {} WHERE {} = ANY(%s)").format(self._table, sql.Identifier(_UNIT))
                connection.execute(query, [removed])

        self._ledger.remove(removed, erase)

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
            damage = f"the ledger has {row.scored} answers and {row.errors} errors, the table {scored} and {errors}"
            yield Committed(
                unit_id=row.unit_id,
                place=f"{self._database}, table {self._name}",
                configuration=row.configuration,
                scored=row.scored,
                errors=row.errors,
                damage="" if (scored, errors) == (row.scored, row.errors) else damage,
            )

    def _make_table(self, columns: dict[str, str]) -> None:
        """Create the table, or compare its columns; once for each set of columns."""
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
        """Compare ledger and table, so that no result is missing or duplicated."""
        with self._database.transaction() as connection:
            told, there = self._ledger.compare(connection, None)  # first, because the table may be created meanwhile
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
