"""Delta tables as destinations: exclusive commits, and values as other readers see them."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import boto3
import pyarrow as pa
import pytest
from botocore.config import Config
from deltalake import DeltaTable
from object_store import CREDENTIALS
from running import free_ports
from scoring_runs import destination_at

from graphkiln_backend.scoring.destinations.base import Destination, Result
from graphkiln_backend.scoring.destinations.delta import DeltaDestination, _add_action
from graphkiln_backend.scoring.errors import CommitConflict, ScoringError, StoreError
from graphkiln_backend.scoring.messages import InputRange, Unit
from graphkiln_backend.scoring.sources.base import Columns
from graphkiln_backend.scoring.sources.files import FileSource
from graphkiln_backend.scoring.verify import verify


def unit(number: int) -> Unit:
    return InputRange(path=f"photos/{number}", part="", identity=str(number), rows=2).unit("model")


def result(of: Unit, name: str = "") -> Result:
    columns = {
        "id": [f"{name}{of.path}/0", f"{name}{of.path}/1"],
        "scores": pa.array([[0.5, 0.25], None], pa.list_(pa.float32())),
        "kept": pa.nulls(2),
        "error": pa.array([None, "bad"], pa.string()),
    }
    return Result(unit_id=of.id, configuration="model", table=pa.table(columns))


def opened(folder: Path) -> Destination:
    return destination_at(str(folder), format="delta")


@pytest.fixture
def destination(tmp_path: Path) -> Destination:
    made = opened(tmp_path / "out")
    made.prepare()
    return made


def test_a_second_attempt_is_refused_and_leaves_no_file(destination: Destination, tmp_path: Path) -> None:
    destination.commit(result(unit(0)))
    with pytest.raises(CommitConflict):
        opened(tmp_path / "out").commit(result(unit(0), "other "))
    assert destination.read(unit(0).id, ["id"]).column("id").to_pylist() == ["photos/0/0", "photos/0/1"]
    assert len(list((tmp_path / "out").glob("*.parquet"))) == 1


def test_two_results_of_a_unit_are_refused(destination: Destination) -> None:
    assert isinstance(destination, DeltaDestination)
    destination.commit(result(unit(0)))
    destination._write([_add_action(result(unit(0)), f"{unit(0).id}-{'0' * 32}.parquet", 1)], None)  # as a restore does
    with pytest.raises(ScoringError, match=f"has two results of unit {unit(0).id}: was an older version"):
        destination.committed_ids()


def test_commit_with_a_lost_response_is_recognized(destination: Destination, monkeypatch: pytest.MonkeyPatch) -> None:
    original, lost = DeltaDestination._write, []

    def write(self: DeltaDestination, *arguments: Any) -> None:
        original(self, *arguments)
        if not lost:
            lost.append(1)
            raise StoreError("lost", passing=True)

    monkeypatch.setattr(DeltaDestination, "_write", write)
    destination.commit(result(unit(0)))
    assert verify(destination, [unit(0)]).ok


def test_table_with_other_columns_is_refused(destination: Destination) -> None:
    destination.commit(result(unit(0)))
    table = pa.table({"id": [1], "error": pa.nulls(1, pa.string())})
    with pytest.raises(ScoringError, match="has other columns than the results"):
        destination.commit(Result(unit_id=unit(1).id, configuration="model", table=table))


def test_compacted_table_is_refused(destination: Destination, tmp_path: Path) -> None:
    for number in range(3):
        destination.commit(result(unit(number)))
    DeltaTable(tmp_path / "out").optimize.compact()
    with pytest.raises(ScoringError, match="was compacted"):
        opened(tmp_path / "out").prepare()


@pytest.fixture
def other_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """An S3 server that is not in this process: deltalake does not let other threads run while it waits."""
    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name, value)
    (port,) = free_ports(1)
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as server:
        try:
            retrying = Config(retries={"max_attempts": 9})
            client = boto3.client("s3", endpoint_url=f"http://127.0.0.1:{port}", config=retrying)
            client.create_bucket(Bucket="models")
            client.close()
            yield f"127.0.0.1:{port}"
        finally:
            server.kill()


@pytest.mark.slow
def test_in_an_object_store(other_process: str) -> None:
    made = destination_at(f"s3://{other_process}/models/delta", format="delta")
    made.prepare()
    made.commit(result(unit(0)))
    made.commit(result(unit(1)))
    with pytest.raises(CommitConflict):
        made.commit(result(unit(1)))
    assert verify(made, [unit(0), unit(1)]).ok
    found = FileSource(f"s3://{other_process}/models/delta", Columns(image="id")).ranges(2)
    assert [each.rows for each in found] == [2, 2], "as a source, too"


def test_parquet_and_delta_do_not_share_a_folder(tmp_path: Path) -> None:
    """A reader of the folder would read both."""
    plain, table = destination_at(str(tmp_path)), opened(tmp_path)
    plain.prepare()
    plain.commit(result(unit(0)))
    with pytest.raises(ScoringError, match="holds results of graphkiln score that are no Delta table"):
        table.prepare()
    plain.remove([unit(0).id])
    table.prepare()
    table.commit(result(unit(0)))
    for ask in (plain.prepare, lambda: list(plain.committed_ids())):
        with pytest.raises(ScoringError, match=r"is a Delta table \(--format delta, or another --out\)"):
            ask()


# What is written into a Delta table is read by others with the same values.

UNIT = "0" * 32
COLUMNS: dict[str, tuple[pa.DataType, Any]] = {
    "u8": (pa.uint8(), 200),
    "u16": (pa.uint16(), 60_000),
    "u32": (pa.uint32(), 4_000_000_000),
    "u64": (pa.uint64(), 2**64 - 1),
    "list": (pa.list_(pa.uint8()), [200, 1]),
    "fixed": (pa.list_(pa.float32(), 2), [0.5, 0.25]),
    "struct": (pa.struct([("n", pa.uint16()), ("t", pa.large_string())]), {"n": 60_000, "t": "x"}),
    "bytes": (pa.binary(2), b"ab"),
    "word": (pa.dictionary(pa.int8(), pa.string()), "x"),
    "nothing": (pa.null(), None),
}


def committed(folder: Path, table: pa.Table) -> pa.Table:
    destination = destination_at(str(folder), format="delta")
    destination.prepare()
    table = table.append_column("error", pa.nulls(len(table), pa.string()))
    destination.commit(Result(unit_id=UNIT, configuration="model", table=table))
    return DeltaTable(folder).to_pyarrow_table()


def test_other_readers_see_the_same_values(tmp_path: Path) -> None:
    table = pa.table({name: pa.array([value], kind) for name, (kind, value) in COLUMNS.items()})
    (row,) = committed(tmp_path / "out", table).to_pylist()
    expected = {name: value for name, (_, value) in COLUMNS.items()} | {"u64": Decimal(2**64 - 1), "error": None}
    assert row == expected


def test_times_have_microseconds(tmp_path: Path) -> None:
    table = pa.table(
        {"here": pa.array([1_007], pa.timestamp("ns")), "there": pa.array([5], pa.timestamp("s", "+02:00"))}
    )
    read = committed(tmp_path / "out", table)
    assert read.column("here").cast(pa.int64()).to_pylist() == [1]
    assert read.column("there").cast(pa.int64()).to_pylist() == [5_000_000]


def test_unsupported_type_is_refused_and_leaves_no_file(tmp_path: Path) -> None:
    with pytest.raises(ScoringError, match=r"Delta has no column for this: .*Time64.*--keep-columns") as raised:
        committed(tmp_path / "out", pa.table({"t": pa.array([1], pa.time64("us"))}))
    assert "\n" not in str(raised.value)
    assert list((tmp_path / "out").iterdir()) == []
