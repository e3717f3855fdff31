"""Tables and queries of a real PostgreSQL: every row once by its key, and changes are noticed."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from postgres_server import POSTGRES_MISSING, PostgresServer
from scored_inputs import plan, read_all, read_unit

from graphkiln_backend.scoring.errors import InputChanged, ScoringError, SourceUnavailable
from graphkiln_backend.scoring.sources import postgres
from graphkiln_backend.scoring.sources.base import Columns
from graphkiln_backend.scoring.sources.postgres import TableSource

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(POSTGRES_MISSING is not None, reason=str(POSTGRES_MISSING)),
]


@pytest.fixture(scope="module")
def server() -> Iterator[PostgresServer]:
    with PostgresServer() as running:
        yield running


@pytest.fixture
def database(server: PostgresServer) -> Iterator[psycopg.Connection[Any]]:
    with server.connect() as connection:
        connection.execute("DROP TABLE IF EXISTS photos CASCADE")
        connection.execute("CREATE TABLE photos (id bigint PRIMARY KEY, image bytea, label text, taken timestamptz)")
        fill(connection, range(100))
        yield connection


def fill(connection: psycopg.Connection[Any], ids: Any) -> None:
    with connection.cursor() as cursor:
        cursor.executemany("INSERT INTO photos VALUES (%s, %s, %s)", [(id_, b"%d" % id_, f"l{id_}") for id_ in ids])


def source(server: PostgresServer, query: str = "photos", **columns: Any) -> TableSource:
    return TableSource(server.address, query, Columns(**{"id": "id", **columns}))


@pytest.mark.usefixtures("database")
def test_rows_come_in_the_order_of_their_keys(server: PostgresServer) -> None:
    rows = read_all(source(server, kept=("label", "taken", "id")), 7)
    assert [row.id for row in rows] == [str(number) for number in range(100)]
    assert [row.content for row in rows] == [b"%d" % number for number in range(100)]
    assert rows[3].kept == {"label": "l3", "taken": None, "id": 3}


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=15)
@given(keys=st.sets(st.text("aAbBzZ9 éß-_'", min_size=1, max_size=6), min_size=1, max_size=40), rows=st.integers(1, 9))
def test_ranges_of_text_keys_cover_each_row_once(
    server: PostgresServer, database: Any, keys: set[str], rows: int
) -> None:
    database.execute("DROP TABLE IF EXISTS named; CREATE TABLE named (name text PRIMARY KEY, image bytea)")
    with database.cursor() as cursor:
        cursor.executemany("INSERT INTO named VALUES (%s, %s)", [(key, key.encode()) for key in keys])
    read = read_all(source(server, "named", id="name"), rows)
    assert {row.id: row.content for row in read} == {key: key.encode() for key in keys}
    assert len(read) == len(keys)


def test_a_new_row_changes_at_most_two_units(server: PostgresServer, database: Any) -> None:
    database.execute("DELETE FROM photos WHERE id = 50")
    before = {unit.id for unit in plan(source(server), 7)}
    fill(database, [50])
    after = {unit.id for unit in plan(source(server), 7)}
    assert 1 <= len(after - before) <= 2


def test_an_update_stops_its_unit_and_changes_no_other(server: PostgresServer, database: Any) -> None:
    units = plan(source(server), 20)
    database.execute("UPDATE photos SET image = 'new' WHERE id = 0")
    with pytest.raises(InputChanged, match="from key 0 to"):
        read_unit(source(server), units[0])
    again = plan(source(server), 20)
    assert again[0].id != units[0].id
    assert again[1:] == units[1:]
    assert read_unit(source(server), again[0])[0].content == b"new"


def test_deleted_and_inserted_rows_are_noticed(server: PostgresServer, database: Any) -> None:
    (unit,) = plan(source(server, "SELECT * FROM photos WHERE id <> 7"), 10**9)
    for change in ("DELETE FROM photos WHERE id = 8", "INSERT INTO photos VALUES (8), (1000)"):
        database.execute(change)
        if "DELETE" in change:
            with pytest.raises(InputChanged):
                read_unit(source(server, "SELECT * FROM photos WHERE id <> 7"), unit)
    read_unit(source(server, "SELECT * FROM photos WHERE id <> 7"), unit)  # keys are all that a query has


@pytest.mark.usefixtures("database")
def test_query(server: PostgresServer) -> None:
    query = "SELECT p.id AS key, image, upper(label) AS label FROM photos p WHERE label LIKE '%1' ORDER BY image;"
    rows = read_all(source(server, query, id="key", kept=("label",)), 3)
    assert [row.id for row in rows] == [str(number) for number in range(1, 100, 10)]
    assert rows[0].kept == {"label": "L1"}


def test_images_may_be_paths(server: PostgresServer, database: Any, tmp_path: Any) -> None:
    (tmp_path / "1.jpg").write_bytes(b"one")
    database.execute("DELETE FROM photos WHERE id > 2")
    database.execute("UPDATE photos SET label = %s WHERE id = 1", [f"{tmp_path}/1.jpg"])
    database.execute("UPDATE photos SET label = NULL WHERE id = 2")
    zero, one, two = read_all(source(server, image="label"))
    assert (one.content, two.error) == (b"one", "the row has no image")
    assert "'l0' is a relative path" in zero.error


@pytest.mark.parametrize(
    ("query", "columns", "message"),
    [
        ("nothing", {}, 'relation "nothing" does not exist'),
        ("SELECT 1 AS id", {}, "has 0 columns of bytes"),
        ("photos", {"id": "label2"}, "label2"),
        ("photos", {"image": "taken"}, "column 'taken' holds no images"),
        ("photos", {"kept": ("nope",)}, "no column 'nope'"),
        ("SELECT 1 AS id, ''::bytea AS i UNION ALL SELECT 1, 'x'", {}, "key '1' occurs more than once"),
        ("SELECT NULL::int AS id, ''::bytea AS i", {}, "rows without 'id'"),
        ("SELECT * FROM photos WHERE false", {}, "gives no rows"),
        ("DELETE FROM photos RETURNING *", {}, "syntax error|cannot|not supported|WITH"),
    ],
)
def test_invalid_queries_and_columns_are_refused(
    server: PostgresServer, database: Any, query: str, columns: dict[str, Any], message: str
) -> None:
    with pytest.raises(ScoringError, match=message):
        read_all(source(server, query, **columns))
    assert database.execute("SELECT count(*) FROM photos").fetchone() == (100,)


@pytest.mark.usefixtures("database")
def test_unavailable_server_is_an_outage(server: PostgresServer) -> None:
    units = plan(source(server), 20)
    server.stop()
    try:
        with pytest.raises(SourceUnavailable, match="cannot be read"):
            read_unit(source(server), units[0])
    finally:
        server.start()
    assert len(read_unit(source(server), units[0])) == units[0].rows


@pytest.mark.usefixtures("database")
def test_units_contain_no_password(server: PostgresServer) -> None:
    text = server.address.replace("graphkiln@", "graphkiln:secret@")
    units = plan(TableSource(text, "photos", Columns(id="id")), 20)
    assert not any("secret" in f"{unit.path} {unit.part}" for unit in units)
    assert units == plan(source(server), 20)


def test_options_of_the_address_are_used(server: PostgresServer, database: Any) -> None:
    database.execute("DROP SCHEMA IF EXISTS shop CASCADE; CREATE SCHEMA shop")
    database.execute("CREATE TABLE shop.items AS SELECT now() AS id, 'x'::bytea AS image")
    address = f"{server.address}?options=-csearch_path%3Dshop%20-ctimezone%3DAsia/Tokyo%20-cdatestyle%3DGerman"
    (row,) = read_all(TableSource(address, "items", Columns(id="id")))
    assert row.id.endswith("+00")


def test_query_and_key_are_required(server: PostgresServer) -> None:
    for query, columns, option in (("", Columns(id="id"), "--query"), ("photos", Columns(), "--id-column")):
        with pytest.raises(ScoringError, match=option):
            TableSource(server.address, query, columns)


def test_update_of_a_partitioned_table_is_noticed(server: PostgresServer, database: Any) -> None:
    database.execute("DROP TABLE IF EXISTS parted")
    database.execute("CREATE TABLE parted (id int, image bytea) PARTITION BY RANGE (id)")
    database.execute("CREATE TABLE low PARTITION OF parted FOR VALUES FROM (0) TO (10)")
    database.execute("CREATE TABLE high PARTITION OF parted FOR VALUES FROM (10) TO (20)")
    database.execute("INSERT INTO parted SELECT n, 'x' FROM generate_series(5, 14) AS n")
    (unit,) = plan(source(server, "parted"), 10**9)
    assert len(read_unit(source(server, "parted"), unit)) == 10
    database.execute("UPDATE parted SET image = 'y' WHERE id = 12")
    with pytest.raises(InputChanged):
        read_unit(source(server, "parted"), unit)


@pytest.mark.usefixtures("database")
def test_a_query_may_end_with_a_comment(server: PostgresServer) -> None:
    assert len(read_all(source(server, "SELECT * FROM photos WHERE id < 5 -- the first ones"), 100)) == 5


def test_infinite_time_is_refused_with_a_hint(server: PostgresServer, database: Any) -> None:
    database.execute("UPDATE photos SET taken = 'infinity' WHERE id = 7")
    with pytest.raises(ScoringError, match=r"too large.*COLUMN::text AS COLUMN"):
        read_all(source(server, kept=("taken",)), 10**9)
    query = "SELECT id, image, taken::text AS taken FROM photos"
    rows = read_all(source(server, query, kept=("taken",)), 10**9)
    assert (rows[6].kept, rows[7].kept) == ({"taken": None}, {"taken": "infinity"})


@pytest.mark.parametrize("rows", [100, 30])
def test_row_that_the_server_cannot_return_is_an_error(server: PostgresServer, database: Any, rows: int) -> None:
    """Also several of them, at the ends of what is fetched together, and in the last fetch."""
    guilty = {0, 15, 16, 50, 99}
    database.execute("UPDATE photos SET label = CASE WHEN id = ANY(%s) THEN '!' ELSE 'eA==' END", [list(guilty)])
    query = "SELECT id, decode(label, 'base64') AS image, taken FROM photos"
    read = read_all(source(server, query, kept=("taken",)), rows)
    assert [row.id for row in read] == [str(number) for number in range(100)]
    assert {int(row.id) for row in read if row.content is None} == guilty
    assert {row.content for row in read if not row.error} == {b"x"}
    assert all("the database cannot give it: " in row.error for row in read if row.content is None)


def test_changes_beside_an_unreadable_row_are_noticed(server: PostgresServer, database: Any) -> None:
    query = "SELECT id, decode(label, 'base64') AS image FROM photos"
    database.execute("UPDATE photos SET label = '!' WHERE id = 3")
    (unit,) = plan(source(server, query), 10**9)
    database.execute("DELETE FROM photos WHERE id = 99")
    with pytest.raises(InputChanged, match="have changed"):
        read_unit(source(server, query), unit)


@pytest.mark.usefixtures("database")
def test_idle_timeout_of_the_server_is_overridden(server: PostgresServer) -> None:
    text = f"{server.address}?options=-cidle_in_transaction_session_timeout%3D1000"
    patient = TableSource(text, "photos", Columns(id="id"))
    (unit,) = plan(patient, 10**9)
    rows = patient.rows(unit)
    next(rows)
    time.sleep(1.5)  # longer than the server would wait
    assert len(list(rows)) == 99


@pytest.mark.usefixtures("database")
def test_transaction_timeout_is_an_outage(server: PostgresServer, monkeypatch: pytest.MonkeyPatch) -> None:
    (unit,) = plan(source(server), 10**9)
    monkeypatch.setattr(postgres, "_SETTINGS", "SET LOCAL idle_in_transaction_session_timeout = 50")
    slowly = (time.sleep(0.1) for _ in source(server).rows(unit))
    with pytest.raises(SourceUnavailable, match="cannot be read"):
        list(slowly)
    monkeypatch.undo()
    assert len(read_unit(source(server), unit)) == 100
