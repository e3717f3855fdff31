"""The ledger: one of several attempts of a unit commits."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import psycopg
import pyarrow as pa
import pytest

from graphkiln_backend.scoring.destinations.base import Result
from graphkiln_backend.scoring.destinations.database import Database
from graphkiln_backend.scoring.destinations.ledger import Ledger, LedgeredDestination
from graphkiln_backend.scoring.destinations.object_store import ObjectStore
from graphkiln_backend.scoring.destinations.parquet import ParquetDestination
from graphkiln_backend.scoring.errors import CommitConflict, DestinationBusy, ScoringError, StoreError
from graphkiln_backend.scoring.messages import InputRange
from graphkiln_backend.scoring.verify import verify
from graphkiln_backend.storage.address import RemoteAddress

if TYPE_CHECKING:
    from postgres_server import PostgresServer

pytestmark = pytest.mark.slow
TABLE = pa.table({"id": ["a", "b"], "error": pa.array([None, "bad"], pa.string())})
RESULT = Result(unit_id="u", configuration="model", table=TABLE)


@pytest.fixture
def ledger(database: Database) -> Ledger:
    made = Ledger(database, "here")
    made.prepare()
    return made


def nothing(*_: object) -> None:
    pass


def test_second_attempt_waits_and_continues_if_the_first_fails(ledger: Ledger) -> None:
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


def test_connection_that_breaks_during_a_commit_is_a_temporary_error(ledger: Ledger, postgres: PostgresServer) -> None:
    def break_connection(connection: psycopg.Connection[Any], _: str) -> None:
        with postgres.connect() as other:
            other.execute("SELECT pg_terminate_backend(%s)", [connection.info.backend_pid])
        connection.execute("SELECT 1")

    with pytest.raises(StoreError) as broken:
        ledger.commit(RESULT, break_connection)
    assert broken.value.passing
    assert ledger.unit_ids() == []
    ledger.commit(RESULT, nothing)
    assert ledger.unit_ids() == ["u"]
    with pytest.raises(CommitConflict):  # as if the response had been lost
        ledger.commit(RESULT, nothing)


# A store that ignores conditions, with a ledger: one object per unit.

if TYPE_CHECKING:
    from rclone_server import RcloneServer

UNIT = InputRange(path="photos", part="", identity="1", rows=2).unit("model")


def unit_result(name: str = "a") -> Result:
    table = pa.table({"id": [name, f"{name}2"], "error": pa.array([None, "bad"], pa.string())})
    return Result(unit_id=UNIT.id, configuration="model", table=table)


@pytest.fixture(scope="module")
def rclone() -> Iterator[RcloneServer]:
    from rclone_server import RcloneServer

    with RcloneServer() as server:
        yield server


@pytest.fixture
def store(rclone: RcloneServer, s3_server: str) -> ObjectStore:
    assert s3_server, "credentials are in the environment"
    address = RemoteAddress.parse(f"s3://{rclone.address}/models/out")
    assert address
    made = ObjectStore(address, exclusive=False)
    for name in list(made.names()):
        made.delete(name)
    return made


@pytest.fixture
def destination(store: ObjectStore, database: Database) -> LedgeredDestination:
    made = LedgeredDestination(store, database)
    made.prepare()
    return made


def test_an_object_of_an_attempt_that_died_is_written_over(
    destination: LedgeredDestination, store: ObjectStore, database: Database
) -> None:
    def put_and_die(*_: object) -> None:
        store.replace(f"{UNIT.id}.parquet", memoryview(b"half a thought"))
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Ledger(database, destination.ledger_name()).commit(unit_result(), put_and_die)
    assert list(destination.committed_ids()) == []
    destination.commit(unit_result())
    assert verify(destination, [UNIT]).ok


def test_missing_object_is_found_by_verify(destination: LedgeredDestination, store: ObjectStore) -> None:
    destination.commit(unit_result())
    store.delete(f"{UNIT.id}.parquet")
    (finding,) = verify(destination, [UNIT]).findings
    assert finding.unit_id == UNIT.id


def test_bucket_with_two_addresses_has_one_ledger(
    destination: LedgeredDestination, database: Database, rclone: RcloneServer
) -> None:
    destination.commit(unit_result())
    alias = RemoteAddress.parse(f"s3://http://{rclone.address.replace('127.0.0.1', 'localhost')}/models/out")
    assert alias
    other = LedgeredDestination(ObjectStore(alias, exclusive=False), database)
    assert list(other.committed_ids()) == [UNIT.id]
    other.prepare()
    with pytest.raises(CommitConflict):
        other.commit(unit_result("b"))
    with destination.lock("first"), pytest.raises(DestinationBusy):
        other.lock("second")


def test_missing_or_wrong_ledger_is_refused(
    destination: LedgeredDestination, store: ObjectStore, database: Database
) -> None:
    assert destination.ledger_name()
    with pytest.raises(ScoringError, match="has a ledger in postgresql://") as refused:
        ParquetDestination(store).prepare()
    assert "--ledger postgresql://" in str(refused.value)
    with database.transaction() as connection:  # as if it were another one
        connection.execute("DROP TABLE graphkiln_notes")
    elsewhere = LedgeredDestination(store, database)
    for refuse in (lambda: list(elsewhere.committed_ids()), elsewhere.prepare):
        with pytest.raises(ScoringError, match=r"the ledger of .*models/out/? is in postgresql"):
            refuse()
