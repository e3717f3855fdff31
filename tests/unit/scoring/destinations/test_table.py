"""A table of a real PostgreSQL: rows and ledger are one."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pytest

from graphkiln_backend.scoring.destinations.base import Result
from graphkiln_backend.scoring.destinations.database import Database
from graphkiln_backend.scoring.destinations.table import TableDestination
from graphkiln_backend.scoring.errors import CommitConflict, DestinationBusy, ScoringError
from graphkiln_backend.scoring.units import InputRange, Unit
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


def test_rows_come_back_as_they_were(destination: TableDestination) -> None:
    expected = result(unit(0, 50))
    destination.commit(expected)
    read = destination.read(unit(0, 50).id, expected.table.column_names)
    for name in expected.table.column_names:
        values = read.column(name).to_pylist()
        assert values == expected.table.column(name).to_pylist() or name == "scores"
    scores = [None if row is None else np.float32(row).tolist() for row in read.column("scores").to_pylist()]
    assert scores == expected.table.column("scores").to_pylist()


def test_rows_that_somebody_deleted_are_noticed(destination: TableDestination, database: Database) -> None:
    destination.commit(result(unit(0)))
    with database.transaction() as connection:
        connection.execute("DELETE FROM answers WHERE unit_row = 0")
    (finding,) = verify(destination, [unit(0)]).findings
    assert "the ledger has 2 answers and 1 errors, the table 1 and 1" in finding.message


@pytest.mark.parametrize("other", ["public.answers", 'public."answers"'])
def test_another_spelling_is_the_same_table(destination: TableDestination, database: Database, other: str) -> None:
    same = TableDestination(database, other)
    held = destination.claim("first")  # before there is a table
    with pytest.raises(DestinationBusy):
        same.claim("second")
    held.close()
    destination.commit(result(unit(0)))
    with pytest.raises(CommitConflict):
        same.commit(result(unit(0)))
    assert list(same.committed_ids()) == [unit(0).id]


def test_names_with_dots_are_tables_of_their_own(database: Database) -> None:
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
def test_a_table_that_is_gone_is_not_taken_for_done(
    destination: TableDestination, database: Database, statement: str
) -> None:
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


def test_a_table_of_something_else_is_refused(destination: TableDestination, database: Database) -> None:
    with database.transaction() as connection:
        connection.execute("CREATE TABLE answers (unit_id text, unit_row integer, id bigint)")
    with pytest.raises(ScoringError, match=r"table public.answers has other columns.* id text \(it is bigint\)"):
        destination.commit(result(unit(0)))
    assert list(destination.committed_ids()) == []


def test_a_column_that_is_ours(destination: TableDestination) -> None:
    table = pa.table({"unit_id": ["x"], "error": pa.nulls(1, pa.string())})
    with pytest.raises(ScoringError, match="may not be called unit_id"):
        destination.commit(Result(unit_id="u", configuration="model", table=table))


def test_a_value_that_the_database_cannot_hold_is_not_the_stores_fault(
    destination: TableDestination, database: Database
) -> None:
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


def test_readers_see_whole_units_or_none_however_writers_are_killed(
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


def test_what_the_server_cannot_hold_keeps_no_unit_from_its_table(database: Database) -> None:
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
