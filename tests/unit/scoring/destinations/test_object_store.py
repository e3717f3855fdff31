"""Object stores for results: servers with and without conditional writes, and faults."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from botocore.exceptions import ClientError
from faulty_proxy import CUT, LIE, LOSE, REFUSE, FaultyProxy

from graphkiln_backend.scoring.destinations.base import Result
from graphkiln_backend.scoring.destinations.object_store import ObjectStore
from graphkiln_backend.scoring.destinations.parquet import ParquetDestination
from graphkiln_backend.scoring.errors import CommitConflict, ScoringError, StoreError
from graphkiln_backend.scoring.messages import InputRange
from graphkiln_backend.scoring.sources import objects
from graphkiln_backend.scoring.verify import verify
from graphkiln_backend.storage.address import RemoteAddress

UNIT = InputRange(path="photos", part="", identity="1", rows=2).unit("model")
RESULT = Result(
    unit_id=UNIT.id, configuration="model", table=pa.table({"id": ["a", "b"], "error": pa.array([None, "bad"])})
)


def opened(server: str, path: str = "models/out") -> ObjectStore:
    address = RemoteAddress.parse(f"s3://{server}/{path}")
    assert address
    return ObjectStore(address)


@pytest.fixture
def server(s3_server: str, bucket: Any) -> str:
    assert bucket.name == "models"
    return s3_server


@pytest.fixture
def store(server: str) -> ObjectStore:
    return opened(server)


@pytest.fixture
def proxy(server: str) -> Iterator[FaultyProxy]:
    with FaultyProxy(server) as running:
        yield running


def test_store_with_conditional_writes_is_accepted_and_left_empty(store: ObjectStore, bucket: Any) -> None:
    store.prepare()
    assert list(bucket.objects.all()) == []
    assert list(store.names()) == []


def test_contents(store: ObjectStore, tmp_path: Path) -> None:
    assert store.create("a", memoryview(b"content"))
    assert not store.create("a", memoryview(b"another"))
    assert not store.create("a", memoryview(b"longer than that"))
    assert store.create("a", memoryview(b"content"))  # the same content
    store.replace("_note", memoryview(b"1"))
    (tmp_path / "file").write_bytes(b"2" * 1000)
    store.replace("_note", tmp_path / "file")
    assert sorted(store.names()) == ["_note", "a"]
    assert store.read("_note") == b"2" * 1000
    assert store.read("b") is None
    assert store.fetch("_note", tmp_path / "copy")
    assert (tmp_path / "copy").read_bytes() == b"2" * 1000
    assert not store.fetch("b", tmp_path / "copy")
    assert store.place("a").endswith("/models/out/a")
    store.delete("a")
    store.delete("a")
    assert store.read("a") is None
    with pytest.raises(FileNotFoundError):
        store.open("a")


def test_names_are_listed_page_by_page(store: ObjectStore, bucket: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(objects, "_PAGE", 2)
    for name in ("a", "b", "_claim.1", "_claim.2", "_claim.3", ".hidden", "deeper/c"):
        bucket.put_object(Key=f"out/{name}", Body=b"1")
    bucket.put_object(Key="out-of-it", Body=b"1")
    assert sorted(store.names()) == ["_claim.1", "_claim.2", "_claim.3", "a", "b"]


def test_no_such_bucket(s3_server: str) -> None:
    with pytest.raises(StoreError, match="no such bucket"):
        opened(s3_server, "nowhere/out").prepare()
    with pytest.raises(StoreError, match="nowhere"):
        list(opened(s3_server, "nowhere/out").names())


@pytest.mark.slow
@pytest.mark.usefixtures("s3_server")
def test_server_that_ignores_conditions_is_refused() -> None:
    from rclone_server import RcloneServer

    with RcloneServer() as server, pytest.raises(ScoringError, match=r"ignores the condition.*--ledger postgresql://"):
        opened(server.address).prepare()


@pytest.mark.slow
class TestFaults:
    """The service fails while a unit is committed: it has a whole result once, or there is a clear error."""

    def test_commit_with_a_lost_response_is_recognized(self, proxy: FaultyProxy) -> None:
        destination = ParquetDestination(opened(proxy.address))
        proxy.times(1, LOSE)
        destination.commit(RESULT)
        assert verify(destination, [UNIT]).ok
        with pytest.raises(CommitConflict):
            destination.commit(RESULT)

    def test_busy_service_is_retried(self, proxy: FaultyProxy) -> None:
        destination = ParquetDestination(opened(proxy.address))
        proxy.times(3, REFUSE)
        destination.commit(RESULT)
        assert verify(destination, [UNIT]).ok

    def test_service_that_stays_busy_is_a_store_error(
        self, proxy: FaultyProxy, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        store = opened(proxy.address)
        monkeypatch.setattr(store._opened(), "retries", 1)
        proxy.times(1000, REFUSE)
        with pytest.raises(StoreError) as raised:
            ParquetDestination(store).commit(RESULT)
        assert raised.value.passing

    def test_confirmed_but_missing_object_is_noticed(self, proxy: FaultyProxy) -> None:
        proxy.times(1, LIE)
        with pytest.raises(StoreError, match=r"confirmed \d+ bytes, and has none"):
            ParquetDestination(opened(proxy.address)).commit(RESULT)

    def test_truncated_response_is_noticed(self, proxy: FaultyProxy) -> None:
        destination = ParquetDestination(opened(proxy.address))
        destination.commit(RESULT)
        proxy.fault = lambda method, path: CUT if method == "GET" and UNIT.id in path else None
        (finding,) = verify(destination, [UNIT]).findings
        assert finding.unit_id == UNIT.id
        proxy.fault = lambda *_: None
        assert verify(destination, [UNIT]).ok

    def test_unreachable_service_is_a_store_error(self, proxy: FaultyProxy, monkeypatch: pytest.MonkeyPatch) -> None:
        from running import free_ports

        (port,) = free_ports(1)
        store = opened(f"127.0.0.1:{port}")
        monkeypatch.setattr(store._opened(), "retries", 1)
        with pytest.raises(StoreError, match="cannot be reached") as raised:
            store.create("a", memoryview(b"1"))
        assert raised.value.passing
        assert proxy.requests == []


def test_condition_that_another_server_refuses_is_a_conflict(
    store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As s3fs reports the response of servers that do not name the condition."""
    answer: Any = {"Error": {"Code": "PreconditionFailed"}, "ResponseMetadata": {"HTTPStatusCode": 412}}
    store.create("a", memoryview(b"first"))

    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(errno.EINVAL, "a condition did not hold") from ClientError(answer, "PutObject")

    monkeypatch.setattr(store._system, "pipe_file", refuse)
    assert not store.create("a", memoryview(b"other"))
    assert store.create("a", memoryview(b"first")), "the response to its own put was lost"
