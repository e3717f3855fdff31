"""Arrow's types as PostgreSQL's, and values as it takes them."""

from __future__ import annotations

import json
import math
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
    (pa.types.is_string_view, "text"),
    (pa.types.is_binary, "bytea"),
    (pa.types.is_large_binary, "bytea"),
    (pa.types.is_binary_view, "bytea"),
    (pa.types.is_fixed_size_binary, "bytea"),
    (pa.types.is_date, "date"),
    (pa.types.is_time, "time without time zone"),
    (pa.types.is_duration, "interval"),
)


_NULL = r"\x00"
"""What stands for a null character, which text of PostgreSQL cannot hold."""
_COARSER = {pa.time64("ns"): pa.time64("us"), pa.duration("ns"): pa.duration("us")}


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
    """The values of a column, one per row; of times, the microseconds that PostgreSQL keeps."""
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
    """JSON, in which bytes are hexadecimal as PostgreSQL writes them, and what else it lacks is text."""
    try:
        text = json.dumps(value, default=_as_text, allow_nan=False)
    except ValueError:  # of numbers that are none
        text = ""
    return text if text and "\\u0000" not in text else json.dumps(_holdable(value), default=_as_text)


def _as_text(value: Any) -> str:
    return f"\\x{value.hex()}" if isinstance(value, bytes) else str(value)


def _holdable(value: Any) -> Any:
    """A value as the server can hold it: without null characters, and in JSON without numbers that are none."""
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
