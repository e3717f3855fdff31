"""The ledger: of several attempts of a unit one commits, whatever dies meanwhile."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import psycopg
import pyarrow as pa
import pytest

from graphkiln_backend.scoring.destinations import ledger as ledger_module
from graphkiln_backend.scoring.destinations.base import Result
from graphkiln_backend.scoring.destinations.database import Database
from graphkiln_backend.scoring.destinations.ledger import Ledger
from graphkiln_backend.scoring.errors import StoreError

if TYPE_CHECKING:
    from postgres_server import PostgresServer

pytestmark = pytest.mark.slow
TABLE = pa.table({"id": ["a", "b"], "error": pa.array([None, "bad"], pa.string())})
RESULT = Result(unit_id="u", configuration="model", table=TABLE)


@pytest.fixture
def ledger(database: Database, monkeypatch: pytest.MonkeyPatch) -> Ledger:
    monkeypatch.setattr(ledger_module, "_PAUSE_S", 0.01)
    made = Ledger(database, "here")
    made.prepare()
    return made


def nothing(*_: object) -> None:
    pass


def test_what_fails_while_it_is_written_leaves_no_row(ledger: Ledger) -> None:
    def fail(*_: object) -> None:
        raise StoreError("full")

    with pytest.raises(StoreError, match="full"):
        ledger.commit(RESULT, fail)
    assert ledger.unit_ids() == []


def test_a_twin_waits_for_the_first_and_takes_over_where_it_fails(ledger: Ledger) -> None:
    writing, go_on, outcomes = threading.Event(), threading.Event(), []

    def fail_late(*_: object) -> None:
        writing.set()
        go_on.wait(30)
        raise StoreError("it died")

    def attempt(name: str, write: Any) -> None:
        try:
            ledger.commit(RESULT, write)
            outcomes.append(name)
        except StoreError:
            pass

    first = threading.Thread(target=attempt, args=("first", fail_late))
    first.start()
    assert writing.wait(30)
    second = threading.Thread(target=attempt, args=("second", nothing))
    second.start()
    go_on.set()
    first.join()
    second.join()
    assert outcomes == ["second"]


def test_a_commit_whose_answer_was_lost_is_looked_up(ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    original, lost = Ledger._commit, []

    def commit(self: Ledger, *arguments: Any) -> None:
        original(self, *arguments)
        if not lost:
            lost.append(1)
            raise StoreError("connection lost", passing=True)

    monkeypatch.setattr(Ledger, "_commit", commit)
    ledger.commit(RESULT, nothing)
    assert ledger.unit_ids() == ["u"]


def test_a_connection_that_breaks_while_a_unit_is_written_is_made_again(
    ledger: Ledger, postgres: PostgresServer
) -> None:
    broken = []

    def write(connection: psycopg.Connection[Any], _: str) -> None:
        if not broken:
            broken.append(1)
            with postgres.connect() as other:
                other.execute("SELECT pg_terminate_backend(%s)", [connection.info.backend_pid])
            connection.execute("SELECT 1")

    ledger.commit(RESULT, write)
    assert ledger.unit_ids() == ["u"]
