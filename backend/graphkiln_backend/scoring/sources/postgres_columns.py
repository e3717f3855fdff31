"""The columns of a table or query: which holds images, and what each becomes in the output."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import psycopg
import pyarrow as pa
from psycopg import sql

from graphkiln_backend.scoring.errors import ScoringError
from graphkiln_backend.scoring.sources.reader import Columns

_BYTEA = 17
_TEXTS = {25, 1042, 1043}
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
"""By PostgreSQL's numbers of its types (`pg_type.oid`); all others are carried along as text."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TableColumns:
    """What is read of each row.

    Attributes:
        selected: The image, and what is carried along, as SQL.
        image_is_path: Whether images are named by paths.
        kept: Names and types of what is carried along.
    """

    selected: sql.Composable
    image_is_path: bool
    kept: Sequence[tuple[str, pa.DataType]]


def find_columns(
    connection: psycopg.Connection[Any], source: sql.Composable, columns: Columns, where: str
) -> TableColumns:
    """The columns of a query.

    Args:
        connection: To its database.
        source: What stands behind FROM, called `source`.
        columns: Which are requested.
        where: What to call it.

    Raises:
        ScoringError: There is no such column, or none that must be the image's.
    """
    described = connection.execute(sql.SQL("SELECT * FROM {} LIMIT 0").format(source)).description or []
    types = {column.name: column.type_code for column in described}
    columns.check(types, where)
    image = columns.image or _only_bytes(types, where)
    if types[image] not in {_BYTEA, *_TEXTS}:
        raise ScoringError(f"{where}: column '{image}' holds no images", hint="bytea and text can")
    kept = [(name, _TYPES.get(types[name], pa.string())) for name in columns.kept]
    texts = {name for name, kind in kept if kind == pa.string()}
    selected = [_select(image, as_text=False), *(_select(name, as_text=name in texts) for name, _ in kept)]
    return TableColumns(selected=sql.SQL(", ").join(selected), image_is_path=types[image] in _TEXTS, kept=kept)


def as_array(value: Any, kind: pa.DataType) -> pa.Array:
    """A value as an array of one element."""
    return pa.array([value], kind)


def _only_bytes(types: dict[str, int], where: str) -> str:
    found = [name for name, kind in types.items() if kind == _BYTEA]
    if len(found) != 1:
        raise ScoringError(
            f"{where} has {len(found)} columns of bytes", hint=f"--image-column, bytes or paths: {', '.join(types)}"
        )
    return found[0]


def _select(name: str, *, as_text: bool) -> sql.Composable:
    column = sql.SQL("source.{}").format(sql.Identifier(name))
    return sql.SQL("{}::text").format(column) if as_text else column
