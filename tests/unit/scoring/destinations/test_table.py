"""A table of a real PostgreSQL: rows and ledger are one."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import time
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest

from graphkiln_backend.scoring.destinations.base import Result
from graphkiln_backend.scoring.destinations.database import Database
from graphkiln_backend.scoring.destinations.table import (
    TableDestination,
    parse_table,
    resolve_table,
    sql_type,
    sql_values,
)
from graphkiln_backend.scoring.errors import ScoringError
from graphkiln_backend.scoring.messages import InputRange, Unit
from graphkiln_backend.scoring.verify import verify

if TYPE_CHECKING:
    from postgres_server import PostgresServer

pytestmark = pytest.mark.slow


def unit(number: int, rows: int = 3) -> Unit:
    return InputRange(path=f"photos/{number}", part="", identity=str(number), rows=rows).unit("model")


def result(of: Unit) -> Result:
    errors = [None] * (of.rows - 1) + ["not an image: \t\\N \n'"]
    scores = np.random.default_rng(0).random((of.rows, 2), np.float32)
    columns = {
        "id": [f"{of.path}/{index}\tä\\" for index in range(of.rows)],
        "labels": pa.array([["cat", "a, {b}"]] * (of.rows - 1) + [None], pa.list_(pa.string())),
        "scores": pa.array([*scores[:-1].tolist(), None], pa.list_(pa.float32())),
        "box": pa.array([{"x": 1}] * of.rows),
        "error": pa.array(errors, pa.string()),
    }
    return Result(unit_id=of.id, configuration="model", table=pa.table(columns))


@pytest.fixture
def destination(database: Database) -> TableDestination:
    made = TableDestination(database, "answers")
    made.prepare()
    return made


def test_deleted_rows_are_found_by_verify(destination: TableDestination, database: Database) -> None:
    destination.commit(result(unit(0)))
    with database.transaction() as connection:
        connection.execute("DELETE FROM answers WHERE unit_row = 0")
    (finding,) = verify(destination, [unit(0)]).findings
    assert "the ledger has 2 answers and 1 errors, the table 1 and 1" in finding.message


def test_table_names_with_dots(database: Database) -> None:
    with database.transaction() as connection:
        connection.execute("CREATE SCHEMA a")
    tables = [TableDestination(database, name) for name in ('"a.b"', "a.b", '"A"')]
    for each in tables:
        each.prepare()
        each.commit(result(unit(0)))
        assert verify(each, [unit(0)]).ok
    with database.transaction() as connection:
        query = "SELECT nspname || '/' || relname FROM pg_class JOIN pg_namespace n ON n.oid = relnamespace "
        found = connection.execute(query + "WHERE relname IN ('a.b', 'b', 'A')").fetchall()
        connection.execute("DROP SCHEMA a CASCADE")
    assert sorted(name for (name,) in found) == ["a/b", "public/A", "public/a.b"]


def test_a_ledger_of_another_schema_doubles_no_rows(
    destination: TableDestination, database: Database, postgres: PostgresServer
) -> None:
    destination.commit(result(unit(0)))
    with database.transaction() as connection:
        connection.execute("CREATE SCHEMA app")
    other = Database(f"{postgres.address}?options=-csearch_path%3Dapp")
    astray = TableDestination(other, "public.answers")
    with pytest.raises(ScoringError, match="holds rows that its ledger does not know"):
        astray.prepare()
    with pytest.raises(ScoringError, match=f"rows of unit {unit(0).id} that its ledger does not know"):
        astray.commit(result(unit(0)))
    other.close()
    with database.transaction() as connection:
        assert connection.execute("SELECT count(*) FROM answers").fetchone() == (3,)
        assert connection.execute("SELECT count(*) FROM app.graphkiln_units").fetchone() == (0,)
        connection.execute("DROP SCHEMA app CASCADE")


@pytest.mark.parametrize("statement", ["DROP TABLE answers", "TRUNCATE answers"])
def test_dropped_or_empty_table_is_refused(destination: TableDestination, database: Database, statement: str) -> None:
    destination.commit(result(unit(0)))
    destination.prepare()
    with database.transaction() as connection:
        connection.execute(statement)
    assert [finding.unit_id for finding in verify(destination, [unit(0)]).findings] == [unit(0).id]
    with pytest.raises(ScoringError, match=r"public\.answers, which is gone or empty") as raised:
        destination.prepare()
    with database.transaction() as connection:
        connection.execute(str(raised.value).rpartition("forget them: ")[2].rstrip(")").encode())
    destination.prepare()
    destination.commit(result(unit(0)))


def test_table_with_other_columns_is_refused(destination: TableDestination, database: Database) -> None:
    with database.transaction() as connection:
        connection.execute("CREATE TABLE answers (unit_id text, unit_row integer, id bigint)")
    with pytest.raises(ScoringError, match=r"table public.answers has other columns.* id text \(it is bigint\)"):
        destination.commit(result(unit(0)))
    assert list(destination.committed_ids()) == []


def test_reserved_column_is_refused(destination: TableDestination) -> None:
    table = pa.table({"unit_id": ["x"], "error": pa.nulls(1, pa.string())})
    with pytest.raises(ScoringError, match="may not be called unit_id"):
        destination.commit(Result(unit_id="u", configuration="model", table=table))


def test_value_refused_by_a_constraint_is_not_a_store_error(destination: TableDestination, database: Database) -> None:
    destination.commit(result(unit(1)))
    with database.transaction() as connection:
        connection.execute("ALTER TABLE answers ADD CHECK (id <> 'a')")
    table = result(unit(0)).table.set_column(0, "id", pa.array(["a", "b", "c"]))
    with pytest.raises(ScoringError, match="violates check constraint"):
        destination.commit(Result(unit_id="u", configuration="model", table=table))
    assert list(destination.committed_ids()) == [unit(1).id]


WRITE = """
import sys
import pyarrow as pa
from graphkiln_backend.scoring.destinations.base import Result
from graphkiln_backend.scoring.destinations.database import Database
from graphkiln_backend.scoring.destinations.table import TableDestination
destination = TableDestination(Database(sys.argv[1]), "answers")
print("writing", flush=True)
number = 0
while True:
    ids = [f"{sys.argv[2]}-{number}-{row}" for row in range(500)]
    table = pa.table({"id": ids, "error": pa.nulls(500, pa.string())})
    destination.commit(Result(unit_id=f"{sys.argv[2]}-{number}", configuration="model", table=table))
    number += 1
"""


def test_killed_writers_leave_whole_units_or_none(
    destination: TableDestination, database: Database, postgres: PostgresServer
) -> None:
    moments = random.Random(7)
    for number in range(4):
        command = [sys.executable, "-c", WRITE, postgres.address, str(number)]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as writer:
            assert writer.stdout
            writer.stdout.readline()
            time.sleep(moments.uniform(0.05, 0.3))
            writer.send_signal(signal.SIGKILL)
        with database.transaction() as connection:
            if connection.execute("SELECT to_regclass('answers')").fetchone() == (None,):
                continue
            counts = connection.execute("SELECT unit_id, count(*) FROM answers GROUP BY 1").fetchall()
        assert {count for _, count in counts} <= {500}
        assert {unit_id for unit_id, _ in counts} <= set(destination.committed_ids())


def test_values_that_postgres_lacks_are_replaced(database: Database) -> None:
    columns = {
        "id": ["a\0b", "c"],
        "caption": ["from the web\0", None],
        "tags": pa.array([["\0"], []], pa.list_(pa.string())),
        "more": [{"t": "\0", "x": float("nan")}, None],
        "error": pa.array([None, "no\0 image"], pa.string()),
    }
    table = TableDestination(database, "odd")
    table.prepare()
    table.commit(Result(unit_id=unit(0).id, configuration="model", table=pa.table(columns)))
    assert table.read(unit(0).id, list(columns)).to_pydict() == {
        "id": ["a\\x00b", "c"],
        "caption": ["from the web\\x00", None],
        "tags": [["\\x00"], []],
        "more": [{"t": "\\x00", "x": "NaN"}, None],
        "error": [None, "no\\x00 image"],
    }


# Table names

if TYPE_CHECKING:
    from graphkiln_backend.scoring.destinations.database import Database


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("answers", ("answers",)),
        ('"answers"', ("answers",)),
        ("Sales.Answers", ("Sales", "Answers")),
        ('"a.b"', ("a.b",)),
        ('sales."2024.q1 ""new"""', ("sales", '2024.q1 "new"')),
    ],
)
def test_parts(text: str, parts: tuple[str, ...]) -> None:
    assert parse_table(text) == parts


@pytest.mark.parametrize("text", ["", "a.b.c", "a b", "a;b", 'a"b', '"', '""', ".a", "a" * 64, '"a\0"'])
def test_invalid_table_names_are_refused(text: str) -> None:
    with pytest.raises(ScoringError, match=r"names no table.*\?table=NAME"):
        parse_table(text)


@pytest.mark.slow
def test_notations_of_a_table_resolve_to_one_name(database: Database) -> None:
    def names(*texts: str) -> set[str]:
        with database.transaction() as connection:
            return {str(resolve_table(connection, parse_table(text))) for text in texts}

    assert names("t", '"t"', "public.t", 'public."t"') == {"public.t"}  # before it is made
    with database.transaction() as connection:
        connection.execute("CREATE SCHEMA app; CREATE TABLE app.t (); SET LOCAL search_path = nowhere, app, public")
        assert str(resolve_table(connection, ("t",))) == "app.t"
        assert str(resolve_table(connection, ("new",))) == "app.new"
        connection.execute("SET LOCAL search_path = nowhere")
        with pytest.raises(ScoringError, match="search_path"):
            resolve_table(connection, ("t",))
        connection.execute("DROP SCHEMA app CASCADE")


# Types and values


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


def test_times_are_rounded_to_microseconds() -> None:
    whole = datetime(2026, 1, 2, 3, 4, 5, 6)
    for kind, expected in (
        (pa.timestamp("ns"), whole),
        (pa.timestamp("ns", "UTC"), whole.replace(tzinfo=UTC)),
        (pa.time64("ns"), whole.time()),
        (pa.duration("ns"), timedelta(microseconds=6)),
    ):
        finer = pc.add(pa.array([expected], kind).cast(pa.int64()), 7).cast(kind)  # by 7 ns
        assert sql_values(pa.chunked_array([finer])) == [expected]


def test_values_that_json_lacks_become_text() -> None:
    kind = pa.struct([("b", pa.binary()), ("t", pa.timestamp("s")), ("d", pa.decimal128(4, 2))])
    row = {"b": b"\xff", "t": datetime(2026, 1, 2), "d": Decimal("1.50")}
    (value,) = sql_values(pa.chunked_array([pa.array([row], kind)]))
    assert json.loads(value.dumps(value.obj)) == {"b": "\\xff", "t": "2026-01-02 00:00:00", "d": "1.50"}
