"""Arrow's types have PostgreSQL's, and values arrive as they are."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from decimal import Decimal

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from psycopg.types.json import Jsonb

from graphkiln_backend.scoring.destinations.table import sql_type, sql_values


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
        (pa.time64("ns"), "time without time zone"),
        (pa.duration("s"), "interval"),
        (pa.binary(4), "bytea"),
        (pa.string_view(), "text"),
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


def test_times_have_the_microseconds_that_the_database_keeps() -> None:
    whole = datetime(2026, 1, 2, 3, 4, 5, 6)
    for kind, expected in (
        (pa.timestamp("ns"), whole),
        (pa.timestamp("ns", "UTC"), whole.replace(tzinfo=UTC)),
        (pa.time64("ns"), whole.time()),
        (pa.duration("ns"), timedelta(microseconds=6)),
    ):
        finer = pc.add(pa.array([expected], kind).cast(pa.int64()), 7).cast(kind)  # by 7 ns
        assert sql_values(pa.chunked_array([finer])) == [expected]


def test_what_json_lacks_is_text() -> None:
    kind = pa.struct([("b", pa.binary()), ("t", pa.timestamp("s")), ("d", pa.decimal128(4, 2))])
    row = {"b": b"\xff", "t": datetime(2026, 1, 2), "d": Decimal("1.50")}
    (value,) = sql_values(pa.chunked_array([pa.array([row], kind)]))
    assert json.loads(value.dumps(value.obj)) == {"b": "\\xff", "t": "2026-01-02 00:00:00", "d": "1.50"}


def test_what_text_of_the_server_cannot_hold_is_written_out() -> None:
    """One caption with a null character would keep a thousand rows from their answers."""
    texts = pa.chunked_array([["a\0b", None, "plain"]])
    for column in (texts, texts.dictionary_encode()):
        assert sql_values(column) == ["a\\x00b", None, "plain"]
    assert sql_values(pa.chunked_array([[["\0", None], None]])) == [["\\x00", None], None]


def test_what_json_of_the_server_cannot_hold_is_written_as_the_server_would() -> None:
    rows = [{"t": "\0", "x": [1.5, float("nan")]}, {"t": "\\u0000", "x": [float("inf"), -float("inf")]}]
    first, second = sql_values(pa.chunked_array([rows]))
    assert json.loads(first.dumps(first.obj)) == {"t": "\\x00", "x": [1.5, "NaN"]}
    assert json.loads(second.dumps(second.obj)) == {"t": "\\u0000", "x": ["Infinity", "-Infinity"]}
