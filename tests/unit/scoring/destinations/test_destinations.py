"""The contract of all destinations: atomic, exclusive commits that can be verified."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from iceberg_tables import open_catalog
from scoring_runs import destination_at

from graphkiln.scoring.running import collect_errors
from graphkiln_backend.scoring.destinations.base import Destination, Result
from graphkiln_backend.scoring.errors import CommitConflict, DestinationBusy
from graphkiln_backend.scoring.messages import InputRange, Unit
from graphkiln_backend.scoring.verify import verify

if TYPE_CHECKING:
    from rclone_server import RcloneServer

Open = Callable[[], Destination]


def unit(number: int = 0) -> Unit:
    return InputRange(path=f"photos/{number}", part="", identity=str(number), rows=3).unit("model")


def result(of: Unit, name: str = "row") -> Result:
    columns = {
        "id": [f"{name}/{of.path}/{index}" for index in range(3)],
        "scores": pa.array([[0.5, 0.25], None, [1.0]], pa.list_(pa.float32())),
        "error": pa.array([None, "no image: \t\\N \n'", None], pa.string()),
    }
    return Result(unit_id=of.id, configuration="model", table=pa.table(columns))


@pytest.fixture(scope="module")
def rclone() -> Iterator[RcloneServer]:
    from rclone_server import RcloneServer

    with RcloneServer() as server:
        yield server


@pytest.fixture(
    params=[
        "folder",
        "delta",
        "iceberg",
        pytest.param("s3"),
        pytest.param("table", marks=pytest.mark.slow),
        pytest.param("ledger", marks=pytest.mark.slow),
    ]
)
def open_it(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Open]:
    """Opens the same destination as another worker would."""

    def fixture(name: str) -> Any:
        return request.getfixturevalue(name)

    where, ledger, form = str(tmp_path / "out"), "", ""
    match request.param:
        case "delta":
            form = "delta"
        case "iceberg":
            open_catalog(tmp_path, fixture("monkeypatch"))
            where = "iceberg:lake/shop.answers"
        case "s3":
            fixture("bucket")
            where = f"s3://{fixture('s3_server')}/models/out"
        case "table":
            fixture("database")
            where = f"{fixture('postgres').address}?table=answers"
        case "ledger":
            fixture("s3_server")  # for its credentials
            fixture("database")
            where = f"s3://{fixture('rclone').address}/models/{tmp_path.name}"
            ledger = fixture("postgres").address
    opened: list[Any] = []

    def open_it() -> Destination:
        opened.append(destination_at(where, ledger, form))
        opened[-1].declare(lambda: result(unit()).table.schema)
        return opened[-1]  # type: ignore[no-any-return]

    yield open_it
    for each in opened:
        if hasattr(each, "_database"):
            each._database.close()


@pytest.fixture
def destination(open_it: Open) -> Destination:
    made = open_it()
    made.prepare()
    return made


def test_committed_results_are_read_back(destination: Destination, open_it: Open, tmp_path: Path) -> None:
    assert list(destination.committed_ids()) == []
    units = [unit(number) for number in range(3)]
    for each in units:
        destination.commit(result(each))
    destination.publish([each.id for each in units], lambda: None)
    expected = result(units[0]).table
    assert destination.read(units[0].id, expected.column_names).to_pydict() == expected.to_pydict()
    found = verify(open_it(), units)
    assert (found.ok, found.scored, found.errors) == (True, 6, 3)
    assert collect_errors(destination, destination.committed_ids()) == 3
    assert destination.notes.fetch("_errors.parquet", tmp_path / "errors")
    errors = {(row["id"], row["unit"]): row["reason"] for row in pq.read_table(tmp_path / "errors").to_pylist()}
    assert errors == {(f"row/{each.path}/1", each.id): "no image: \t\\N \n'" for each in units}
    open_it().prepare()


def test_a_second_attempt_is_refused_until_the_unit_is_removed(destination: Destination, open_it: Open) -> None:
    destination.commit(result(unit()))
    with pytest.raises(CommitConflict):
        open_it().commit(result(unit(), "other"))
    assert destination.read(unit().id, ["id"]).column("id")[0].as_py() == "row/photos/0/0"
    destination.remove([unit().id, unit(7).id])
    assert list(destination.committed_ids()) == []
    assert "none of its 3 rows" in verify(destination, [unit()]).findings[0].message
    destination.commit(result(unit(), "new"))
    destination.publish([unit().id], lambda: None)
    assert verify(destination, [unit()]).ok


def test_one_of_simultaneous_commits_wins(open_it: Open) -> None:
    open_it().prepare()
    winners: list[str] = []
    barrier = threading.Barrier(4)

    def work(number: int) -> None:
        worker = open_it()
        barrier.wait()
        worker.commit(result(unit(number + 1)))
        try:
            worker.commit(result(unit(0), str(number)))
            winners.append(str(number))
        except CommitConflict:
            pass

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    units = [unit(number) for number in range(5)]
    open_it().publish([each.id for each in units], lambda: None)
    found = verify(open_it(), units)
    assert found.ok, found.findings
    (winner,) = winners
    assert open_it().read(unit(0).id, ["id"]).column("id")[0].as_py().startswith(f"{winner}/")


def test_one_driver_at_a_time(destination: Destination, open_it: Open) -> None:
    held = destination.lock("first")
    with pytest.raises(DestinationBusy, match="is being written by run first"):
        open_it().lock("second")
    held.close()
    open_it().lock("second").close()


def test_notes(destination: Destination, open_it: Open, tmp_path: Path) -> None:
    notes = destination.notes
    assert notes.read("_run.json") is None
    assert not notes.fetch("_plan.parquet", tmp_path / "copy")
    assert notes.age_s("_run.json") is None
    notes.replace("_run.json", memoryview(b"1"))
    notes.replace("_run.json", memoryview(b"2"))
    (tmp_path / "plan").write_bytes(b"plan" * 1000)
    notes.replace("_plan.parquet", tmp_path / "plan")
    other = open_it()
    assert other.notes.read("_run.json") == b"2"
    assert 0 <= (notes.age_s("_run.json") or 0.0) < 60
    assert other.notes.fetch("_plan.parquet", tmp_path / "copy")
    assert (tmp_path / "copy").read_bytes() == b"plan" * 1000
    assert list(destination.committed_ids()) == []
    notes.delete("_run.json")
    notes.delete("_run.json")
    assert notes.read("_run.json") is None
