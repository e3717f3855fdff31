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


def test_invalid_address_is_refused() -> None:
    with pytest.raises(ScoringError, match="no address of a database"):
        Database("postgresql://host/db?nonsense=1")


def test_unreachable_server_is_a_store_error_without_the_password() -> None:
    (port,) = free_ports(1)
    with pytest.raises(StoreError) as raised, Database(f"postgresql://me:secret@127.0.0.1:{port}/db").transaction():
        pass
    assert raised.value.passing
    assert "secret" not in str(raised.value)


def test_connection_options_of_the_user_take_precedence(monkeypatch: pytest.MonkeyPatch) -> None:
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
def test_temporary_errors_are_retried(error: psycopg.Error, passing: bool) -> None:
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
def test_refused_statement_is_not_a_store_error(database: Database) -> None:
    with pytest.raises(ScoringError, match="refuses it") as raised, database.transaction() as connection:
        connection.execute("SELECT 1 / 0")
    assert not isinstance(raised.value, StoreError)


@pytest.mark.slow
def test_connection_is_reopened_after_a_restart(database: Database, postgres: PostgresServer) -> None:
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
def test_missing_privilege_is_reported(database: Database, postgres: PostgresServer) -> None:
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
def test_large_note_is_split(database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
