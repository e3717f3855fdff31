"""Arrow's types have PostgreSQL's, and values arrive as they are."""

from __future__ import annotations

import pyarrow as pa
import pytest
from psycopg.types.json import Jsonb

from graphkiln_backend.scoring.destinations.sql_types import sql_type, sql_values


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        (pa.string(), "text"),
        (pa.null(), "text"),
        (pa.uint32(), "bigint"),
        (pa.float32(), "real"),
        (pa.list_(pa.float32()), "real[]"),
        (pa.list_(pa.float32(), 4), "real[]"),
        (pa.list_(pa.list_(pa.float32())), "jsonb"),
        (pa.struct([("x", pa.int32())]), "jsonb"),
        (pa.list_(pa.struct([("x", pa.int32())])), "jsonb"),
        (pa.dictionary(pa.int8(), pa.string()), "text"),
        (pa.timestamp("us", "UTC"), "timestamp with time zone"),
        (pa.timestamp("us"), "timestamp without time zone"),
    ],
)
def test_types(kind: pa.DataType, name: str) -> None:
    assert sql_type(kind) == name


def test_values() -> None:
    assert sql_values(pa.chunked_array([["a", None]])) == ["a", None]
    first, second = sql_values(pa.chunked_array([[{"x": 1}, None]]))
    assert isinstance(first, Jsonb)
    assert first.obj == {"x": 1}
    assert second is None
