"""What a table is called: however a user writes it, a table has one name, under which its ledger and claims are kept.

Parts are taken as they are written, capitals too; a part that holds anything but letters, digits, `_` and `$` stands
between double quotes, as in SQL: `sales."2024.q1"`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import psycopg
from psycopg import sql

from graphkiln_backend.scoring.errors import ScoringError

_PLAIN = r"[\w$]+"
_PART = rf'(?:{_PLAIN}|"(?:[^"\0]|"")+")'
_NAME = re.compile(rf"(?:({_PART})\.)?({_PART})")
_LONGEST = 63
"""Bytes of a name that the server keeps; it cuts longer ones off. Source: NAMEDATALEN."""
_FOUND = (
    "SELECT nspname, relname FROM pg_class JOIN pg_namespace ON pg_namespace.oid = relnamespace "
    "WHERE pg_class.oid = to_regclass(%s)"
)


@dataclass(frozen=True, slots=True)
class TableName:
    """A table by the names that the server keeps.

    Attributes:
        schema: Name of its schema.
        table: Its own.
    """

    schema: str
    table: str

    @property
    def identifier(self) -> sql.Identifier:
        """As statements name it."""
        return sql.Identifier(self.schema, self.table)

    def __str__(self) -> str:
        return f"{_quoted(self.schema)}.{_quoted(self.table)}"


def parse_table(text: str) -> tuple[str, ...]:
    """The parts of a table's name: the table, or the schema and the table.

    Args:
        text: `TABLE` or `SCHEMA.TABLE`.

    Raises:
        ScoringError: It is none.
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
    """The table that is there under a name, or the one that it would make.

    Args:
        connection: Whose search path counts where no schema is named.
        parts: Of the name.

    Raises:
        ScoringError: No schema is named, and none of the search path is there.
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
