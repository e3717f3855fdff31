"""Rows of a PostgreSQL table or query, in the order of a unique key. A range is a range of keys.

The identity of a table's range (also of a partitioned table) is each row's key and `xmin`, the transaction that wrote
the row, which detects updates without reading images. For queries and views it is the keys only, so that updates of a
row are not detected. Both are checked again in the snapshot in which the rows are read.
Source: "System Columns" in PostgreSQL's manual.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import psycopg
import pyarrow as pa
from psycopg import sql
from psycopg.conninfo import conninfo_to_dict

from graphkiln_backend.graph.errors import InvalidInput
from graphkiln_backend.scoring.errors import InputChanged, ScoringError, SourceUnavailable
from graphkiln_backend.scoring.messages import InputRange, Row, Unit
from graphkiln_backend.scoring.sources.base import Columns, cut, decode_part, digest, encode_part, refuse_row
from graphkiln_backend.scoring.sources.places import load_image, locate

KIND = "keys"
_NAME = re.compile(r'(?:[\w$]+|"[^"]+")(?:\.(?:[\w$]+|"[^"]+"))*')
_KEYS_AT_A_TIME = 10_000
_ROWS_AT_A_TIME = 16
# Uniform text of keys, and no timeout of idle transactions while rows are computed. Connection options would override
# the user's settings.
_SETTINGS = """
SET LOCAL timezone = 'UTC'; SET LOCAL datestyle = 'ISO'; SET LOCAL extra_float_digits = 1;
SET LOCAL idle_in_transaction_session_timeout = '1h'
"""
# SQLSTATE classes of errors of a single row: an invalid value, or a damaged page.
_OF_ROWS = ("22", "XX001", "XX002")
_TIMEOUTS = ("25P03", "25P04")  # SQLSTATE of a transaction that exceeded the server's time limit

_CAST = "carry it along as text: --query 'SELECT ..., COLUMN::text AS COLUMN FROM ...'"
# True if each row of a relation has an `xmin`: a table, or a partitioned table without foreign partitions.
_KNOWS_VERSIONS = """
SELECT relkind = 'r' OR (relkind = 'p' AND NOT EXISTS (
    SELECT FROM pg_partition_tree(found.oid) JOIN pg_class AS part ON part.oid = relid WHERE part.relkind = 'f'))
FROM pg_class AS found WHERE oid = to_regclass(%s)
"""

Key = tuple[str, str]  # a row's key as text, and a value that changes with the row
_BYTEA = 17
_TEXTS = {25, 1042, 1043}
# Output types of columns by `pg_type.oid`; all others are copied as text.
_TYPES: dict[int, pa.DataType] = {
    16: pa.bool_(),
    _BYTEA: pa.binary(),
    20: pa.int64(),
    21: pa.int16(),
    23: pa.int32(),
    700: pa.float32(),
    701: pa.float64(),
    1082: pa.date32(),
    1114: pa.timestamp("us"),
    1184: pa.timestamp("us", tz="UTC"),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class TableColumns:
    """Columns to read: SQL of the image and the kept columns, and names and types of the kept columns."""

    selected: sql.Composable
    image_is_path: bool
    kept: Sequence[tuple[str, pa.DataType]]


def find_columns(
    connection: psycopg.Connection[Any], source: sql.Composable, columns: Columns, where: str
) -> TableColumns:
    """Find the columns of a FROM clause, named `source` in SQL and `where` in messages.

    Raises:
        ScoringError: A column does not exist, or there is no single image column.
    """
    described = connection.execute(sql.SQL("SELECT * FROM {} LIMIT 0").format(source)).description or []
    types = {column.name: column.type_code for column in described}
    columns.check(types, where)
    of_bytes = [name for name, kind in types.items() if kind == _BYTEA]
    if not columns.image and len(of_bytes) != 1:
        raise ScoringError(
            f"{where} has {len(of_bytes)} columns of bytes", hint=f"--image-column, bytes or paths: {', '.join(types)}"
        )
    image = columns.image or of_bytes[0]
    if types[image] not in {_BYTEA, *_TEXTS}:
        raise ScoringError(f"{where}: column '{image}' holds no images", hint="bytea and text can")
    kept = [(name, _TYPES.get(types[name], pa.string())) for name in columns.kept]
    texts = {name for name, kind in kept if kind == pa.string()}
    selected = [_select(image, as_text=False), *(_select(name, as_text=name in texts) for name, _ in kept)]
    return TableColumns(selected=sql.SQL(", ").join(selected), image_is_path=types[image] in _TEXTS, kept=kept)


def _select(name: str, *, as_text: bool) -> sql.Composable:
    column = sql.SQL("source.{}").format(sql.Identifier(name))
    return sql.SQL("{}::text").format(column) if as_text else column


class _RowUnreadable(ScoringError):
    """The server cannot return a row, because of the row."""


class TableSource:
    """A table or the result of a query.

    Args:
        text: Address of the database for libpq.
        query: Name of a table, or a SELECT.
        columns: The key (row id), the image or its path, and kept columns.

    Raises:
        ScoringError: No query or no key is given.
    """

    def __init__(self, text: str, query: str, columns: Columns) -> None:
        if not query:
            raise ScoringError("a database holds more than one table", hint="--query takes a table's name or a SELECT")
        if not columns.id:
            raise ScoringError("rows of a database are found by a key", hint="--id-column names a unique column")
        self._text, self._query, self._columns = text, query.strip().rstrip(";"), columns

    def ranges(self, rows: int) -> Iterator[InputRange]:
        """Yield content-defined chunks of keys from one snapshot."""
        with self._connected() as connection:
            nulls = sql.SQL("SELECT 1 FROM {} WHERE {} IS NULL LIMIT 1").format(self._from(), self._key)
            if connection.execute(nulls).fetchone():
                raise ScoringError(f"{self._query} has rows without '{self._columns.id}', which is their key")
            found = False
            for chunk in cut(_distinct(self._keys(connection)), rows, lambda key: key[0].encode()):
                found = True
                yield self._range(chunk)
        if not found:
            raise ScoringError(f"{self._query} gives no rows")

    def rows(self, unit: Unit) -> Iterator[Row]:
        """Yield the rows of a range; an unreadable row does not affect others."""
        first, last, expected = decode_part(unit.part)
        hashed, done = hashlib.sha256(), 0
        try:
            with self._connected() as connection:
                table = find_columns(connection, self._from(), self._columns, self._query)
                for values in self._read(connection, table, first, last):
                    hashed.update(_as_bytes((values[0], values[1])))
                    done += 1
                    yield _row(table, values)
        except _RowUnreadable:
            yield from self._one_by_one(first, last, expected, done)
            return
        self._check(hashed.hexdigest(), expected, first, last)

    def _one_by_one(self, first: str, last: str, expected: str, done: int) -> Iterator[Row]:
        """Yield the remaining rows of a range one by one; unreadable rows become errors."""
        with self._connected() as connection:
            table = find_columns(connection, self._from(), self._columns, self._query)
            keys = list(self._keys(connection, self._between(first, last)))
            self._check(_digest(keys), expected, first, last)
            for key, _ in keys[done:]:
                yield self._alone(connection, table, key)

    def _alone(self, connection: psycopg.Connection[Any], table: TableColumns, key: str) -> Row:
        try:
            with connection.transaction():
                (values,) = self._read(connection, table, key, key)
                return _row(table, values)
        except psycopg.Error as error:
            if not _is_of_row(error):
                raise
            kept = {name: pa.nulls(1, kind) for name, kind in table.kept}
            return Row(id=key, load=partial(refuse_row, f"the database cannot give it: {_words(error)}"), kept=kept)

    def _check(self, found: str, expected: str, first: str, last: str) -> None:
        if found != expected:
            raise InputChanged(
                f"the rows of {self._query} from key {first} to {last} have changed since they were planned"
            )

    def _range(self, chunk: list[Key]) -> InputRange:
        content = _digest(chunk)
        part = encode_part(KIND, (chunk[0][0], chunk[-1][0], content))
        return InputRange(path=self._path, part=part, identity=digest(chunk[0][0], content), rows=len(chunk))

    @property
    def _path(self) -> str:
        """Database and query, without user and password."""
        known = conninfo_to_dict(self._text)
        return f"postgresql://{known.get('host', '')}:{known.get('port', 5432)}/{known.get('dbname', '')} {self._query}"

    @contextmanager
    def _connected(self) -> Iterator[psycopg.Connection[Any]]:
        """Connect, in a transaction with one snapshot."""
        try:
            with psycopg.connect(self._text) as connection:
                connection.read_only, connection.isolation_level = True, psycopg.IsolationLevel.REPEATABLE_READ
                connection.execute(_SETTINGS)
                yield connection
        except psycopg.Error as error:
            if isinstance(error, psycopg.OperationalError) or (error.sqlstate or "").startswith(_TIMEOUTS):
                raise SourceUnavailable(f"the database cannot be read: {_words(error)}") from error
            kind = _RowUnreadable if _is_of_row(error) else ScoringError
            of_value = isinstance(error, psycopg.DataError) and not error.sqlstate  # an error of libpq
            raise kind(f"{self._query}: {_words(error)}", hint=_CAST if of_value else "") from error

    @property
    def _is_name(self) -> bool:
        return _NAME.fullmatch(self._query) is not None

    def _from(self) -> sql.Composable:
        text = self._query if self._is_name else f"({self._query}\n)"  # which also ends a comment
        return sql.SQL("{} AS source").format(sql.SQL(text))  # the user's query

    @property
    def _key(self) -> sql.Composable:
        return sql.SQL("source.{}").format(sql.Identifier(self._columns.id))

    def _between(self, first: str, last: str) -> sql.Composable:
        return sql.SQL(" WHERE {0} >= {1} AND {0} <= {2}").format(self._key, sql.Literal(first), sql.Literal(last))

    def _keys(self, connection: psycopg.Connection[Any], where: sql.Composable = sql.SQL("")) -> Iterator[Key]:  # noqa: B008
        return self._select(connection, sql.SQL(""), where, _KEYS_AT_A_TIME)

    def _read(
        self, connection: psycopg.Connection[Any], table: TableColumns, first: str, last: str
    ) -> Iterator[tuple[Any, ...]]:
        columns = sql.SQL(", {}").format(table.selected)
        return self._select(connection, columns, self._between(first, last), _ROWS_AT_A_TIME)

    def _select(
        self, connection: psycopg.Connection[Any], columns: sql.Composable, where: sql.Composable, at_a_time: int
    ) -> Iterator[tuple[Any, ...]]:
        """Yield the key and version of rows, and columns, in the order of the key."""
        row = connection.execute(_KNOWS_VERSIONS, [self._query]).fetchone() if self._is_name else None
        query = sql.SQL("SELECT {key}::text, {version}{columns} FROM {source}{where} ORDER BY {key}").format(
            key=self._key,
            version=sql.SQL("source.xmin::text" if row and row[0] else "''"),
            columns=columns,
            source=self._from(),
            where=where,
        )
        with connection.cursor("rows") as cursor:
            cursor.itersize = at_a_time
            yield from cursor.execute(query, binary=bool(columns.as_string()))


def _distinct(keys: Iterable[Key]) -> Iterator[Key]:
    """Yield sorted keys.

    Raises:
        ScoringError: A key is not unique.
    """
    before: str | None = None
    for key in keys:
        if key[0] == before:
            raise ScoringError(f"key '{before}' occurs more than once", hint="--id-column must name a unique column")
        before = key[0]
        yield key


def _digest(chunk: Iterable[Key]) -> str:
    hashed = hashlib.sha256()
    for key in chunk:
        hashed.update(_as_bytes(key))
    return hashed.hexdigest()


def _as_bytes(key: Key) -> bytes:
    return "\0".join((*key, "")).encode()


def _row(table: TableColumns, values: tuple[Any, ...]) -> Row:
    key, _, image, *kept = values
    load = partial(_load_path if table.image_is_path else _load_bytes, image)
    arrays = {name: pa.array([value], kind) for (name, kind), value in zip(table.kept, kept, strict=True)}
    return Row(id=key, load=load, kept=arrays)


def _is_of_row(error: psycopg.Error) -> bool:
    return (error.sqlstate or "").startswith(_OF_ROWS)


def _load_bytes(content: bytes | None) -> bytes:
    if content is None:
        raise InvalidInput("the row has no image")
    return content


def _load_path(path: str | None) -> bytes:
    if not path:
        raise InvalidInput("the row has no image")
    if not path.startswith("/") and "://" not in path:
        raise InvalidInput(f"'{path}' is a relative path, and a database has no folder")
    return load_image(locate("/"), path)


def _words(error: psycopg.Error) -> str:
    return " ".join(str(error).split())
