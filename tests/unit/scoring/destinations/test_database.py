"""Transactions of a real PostgreSQL: all or nothing, and errors that say whose they are."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import psycopg
import pytest
from psycopg import errors
from running import free_ports

from graphkiln_backend.scoring.destinations import database as database_module
from graphkiln_backend.scoring.destinations.database import Database, DatabaseNotes
from graphkiln_backend.scoring.errors import ScoringError, StoreError

if TYPE_CHECKING:
    from postgres_server import PostgresServer


def test_a_text_that_is_no_address() -> None:
    with pytest.raises(ScoringError, match="no address of a database"):
        Database("postgresql://host/db?nonsense=1")


def test_a_server_that_is_not_there_is_the_stores_fault_and_no_password_is_told() -> None:
    (port,) = free_ports(1)
    with pytest.raises(StoreError) as raised, Database(f"postgresql://me:secret@127.0.0.1:{port}/db").transaction():
        pass
    assert raised.value.passing
    assert "secret" not in str(raised.value)


def test_what_the_user_says_of_the_connection_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, object]] = []
    monkeypatch.setattr("psycopg.connect", lambda _, **options: asked.append(options))
    Database("postgresql://h/db?options=-csearch_path%3Dapp&connect_timeout=3")._connection()
    monkeypatch.setenv("PGOPTIONS", "-c work_mem=1GB")
    Database("postgresql://h/db")._connection()
    assert str(asked[0]["options"]).endswith(" -c lock_timeout=2min -csearch_path=app")
    assert str(asked[1]["options"]).endswith(" -c lock_timeout=2min -c work_mem=1GB")
    assert "connect_timeout" not in asked[0]
    assert asked[1]["connect_timeout"] == 10


@pytest.mark.parametrize(
    ("error", "passing"),
    [
        (errors.IdleInTransactionSessionTimeout("too long"), True),
        (errors.ReadOnlySqlTransaction("cannot execute INSERT in a read-only transaction"), True),
        (errors.QueryCanceled("canceling statement due to statement timeout"), True),
        (errors.DiskFull("no space"), False),
        (errors.InsufficientPrivilege("denied"), False),
    ],
)
def test_what_may_be_over_by_itself_is_tried_again(error: psycopg.Error, passing: bool) -> None:
    """A unit whose result is refused is given up after one attempt: a time-out, or a failover, is no refusal."""
    found = Database("postgresql://host/db")._explain(error)
    assert isinstance(found, StoreError)
    assert found.passing is passing


@pytest.mark.slow
def test_a_transaction_is_all_or_nothing(database: Database) -> None:
    with database.transaction() as connection:
        connection.execute("CREATE TABLE t (a int)")
    with pytest.raises(ScoringError), database.transaction() as connection:
        connection.execute("INSERT INTO t VALUES (1)") and connection.execute("INSERT INTO other VALUES (1)")
    with database.transaction() as connection:
        assert connection.execute("SELECT count(*) FROM t").fetchone() == (0,)


@pytest.mark.slow
def test_what_the_database_refuses_is_not_the_stores_fault(database: Database) -> None:
    with pytest.raises(ScoringError, match="refuses it") as raised, database.transaction() as connection:
        connection.execute("SELECT 1 / 0")
    assert not isinstance(raised.value, StoreError)


@pytest.mark.slow
def test_a_server_that_goes_and_comes_back_is_connected_again(database: Database, postgres: PostgresServer) -> None:
    with database.transaction() as connection:
        connection.execute("SELECT 1")
    postgres.stop()
    try:
        for _ in range(2):
            with pytest.raises(StoreError) as raised, database.transaction() as connection:
                connection.execute("SELECT 1")
            assert raised.value.passing
    finally:
        postgres.start()
    with database.transaction() as connection:
        assert connection.execute("SELECT 1").fetchone() == (1,)


@pytest.mark.slow
def test_a_user_without_the_right_is_told_what_it_needs(database: Database, postgres: PostgresServer) -> None:
    with database.transaction() as connection:
        connection.execute("CREATE TABLE t (a int)")
        connection.execute("GRANT USAGE ON SCHEMA public TO PUBLIC")
        connection.execute("DROP ROLE IF EXISTS guest")
        connection.execute("CREATE ROLE guest LOGIN")
    guest = Database(postgres.address.replace("graphkiln@", "guest@"))
    try:
        with pytest.raises(StoreError, match="grant this user"), guest.transaction() as used:
            used.execute("SELECT * FROM t")
    finally:
        guest.close()


@pytest.mark.slow
def test_a_note_larger_than_a_value_of_the_database(
    database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The plan of a hundred million images in a folder names each of them."""
    monkeypatch.setattr(database_module, "_PIECE", 4)
    notes = DatabaseNotes(database, "here")
    notes.prepare()
    long, path = b"0123456789" * 5, tmp_path / "plan"
    path.write_bytes(long)
    notes.replace("_plan", path)
    notes.replace("_plan_", memoryview(b"another"))
    assert notes.read("_plan") == long
    assert notes.fetch("_plan", tmp_path / "copy")
    assert (tmp_path / "copy").read_bytes() == long
    for shorter in (b"01234", b"", b"012345678"):
        notes.replace("_plan", memoryview(shorter))
        assert notes.read("_plan") == shorter
    notes.delete("_plan")
    assert (notes.read("_plan"), notes.read("_plan_")) == (None, b"another")
    assert DatabaseNotes(database, "there").read("_plan_") is None
    assert not notes.fetch("_plan", tmp_path / "none")
    assert not (tmp_path / "none").exists()
