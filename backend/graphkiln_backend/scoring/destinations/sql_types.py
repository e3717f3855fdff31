"""Arrow's types as PostgreSQL's, and values as it takes them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pyarrow as pa
from psycopg.types.json import Jsonb

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
    (pa.types.is_binary, "bytea"),
    (pa.types.is_large_binary, "bytea"),
    (pa.types.is_date, "date"),
)


def sql_type(kind: pa.DataType) -> str:
    """The type of a column, as PostgreSQL writes it; `jsonb` for what has no other: structs, lists of lists."""
    if pa.types.is_dictionary(kind):
        return sql_type(kind.value_type)
    if pa.types.is_timestamp(kind):
        return "timestamp with time zone" if kind.tz else "timestamp without time zone"
    if _is_list(kind):
        inner = sql_type(kind.value_type)
        return "jsonb" if inner == "jsonb" or inner.endswith("[]") else f"{inner}[]"
    return next((name for is_kind, name in _SCALARS if is_kind(kind)), "jsonb")


def sql_values(column: pa.ChunkedArray) -> list[Any]:
    """The values of a column, one per row."""
    values: list[Any] = column.to_pylist()
    if sql_type(column.type) == "jsonb":
        return [None if value is None else Jsonb(value) for value in values]
    return values


def _is_list(kind: pa.DataType) -> bool:
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind))
