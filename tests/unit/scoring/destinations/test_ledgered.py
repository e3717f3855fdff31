"""A store that ignores conditions, with a ledger: one object per unit, whichever attempt won."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pyarrow as pa
import pytest

from graphkiln_backend.scoring.destinations.base import Result
from graphkiln_backend.scoring.destinations.database import Database
from graphkiln_backend.scoring.destinations.ledger import Ledger, LedgeredDestination
from graphkiln_backend.scoring.destinations.object_store import ObjectStore
from graphkiln_backend.scoring.destinations.parquet import ParquetDestination
from graphkiln_backend.scoring.errors import CommitConflict, DestinationBusy, ScoringError
from graphkiln_backend.scoring.units import InputRange
from graphkiln_backend.scoring.verify import verify
from graphkiln_backend.storage.address import RemoteAddress

if TYPE_CHECKING:
    from rclone_server import RcloneServer

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("s3_server")]
UNIT = InputRange(path="photos", part="", identity="1", rows=2).unit("model")


def result(name: str = "a") -> Result:
    table = pa.table({"id": [name, f"{name}2"], "error": pa.array([None, "bad"], pa.string())})
    return Result(unit_id=UNIT.id, configuration="model", table=table)


@pytest.fixture(scope="module")
def rclone() -> Iterator[RcloneServer]:
    from rclone_server import RcloneServer

    with RcloneServer() as server:
        yield server


@pytest.fixture
def store(rclone: RcloneServer) -> ObjectStore:
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
        Ledger(database, destination.ledger_name()).commit(result(), put_and_die)
    assert list(destination.committed_ids()) == []
    destination.commit(result())
    assert verify(destination, [UNIT]).ok


def test_an_object_that_is_not_what_was_committed(destination: LedgeredDestination, store: ObjectStore) -> None:
    destination.commit(result())
    store.delete(f"{UNIT.id}.parquet")
    (finding,) = verify(destination, [UNIT]).findings
    assert finding.unit_id == UNIT.id


def test_one_bucket_by_two_addresses_has_one_ledger(
    destination: LedgeredDestination, database: Database, rclone: RcloneServer
) -> None:
    destination.commit(result())
    alias = RemoteAddress.parse(f"s3://http://{rclone.address.replace('127.0.0.1', 'localhost')}/models/out")
    assert alias
    other = LedgeredDestination(ObjectStore(alias, exclusive=False), database)
    assert list(other.committed_ids()) == [UNIT.id]
    other.prepare()
    with pytest.raises(CommitConflict):
        other.commit(result("b"))
    with destination.claim("first"), pytest.raises(DestinationBusy):
        other.claim("second")


def test_two_folders_have_two_ledgers(
    destination: LedgeredDestination, database: Database, rclone: RcloneServer
) -> None:
    destination.commit(result())
    address = RemoteAddress.parse(f"s3://{rclone.address}/models/other")
    assert address
    other = LedgeredDestination(ObjectStore(address, exclusive=False), database)
    assert list(other.committed_ids()) == []
    other.prepare()
    other.commit(result("b"))
    assert other.ledger_name() != destination.ledger_name()


def test_a_ledger_is_neither_left_out_nor_looked_for_elsewhere(
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
