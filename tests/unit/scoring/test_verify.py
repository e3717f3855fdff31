"""Missing, repeated, damaged and mixed results are found, with the unit, its file and a hint."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest

from graphkiln_backend.scoring.destinations.base import Result
from graphkiln_backend.scoring.destinations.folder import FolderStore
from graphkiln_backend.scoring.destinations.parquet import ParquetDestination
from graphkiln_backend.scoring.messages import InputRange, Unit
from graphkiln_backend.scoring.verify import Finding, verify


def unit(number: int, rows: int = 4) -> Unit:
    return InputRange(path=f"photos/{number}", part="", identity=str(number), rows=rows).unit("model")


UNITS = [unit(number) for number in range(5)]


def result(of: Unit, ids: list[str] | None = None, configuration: str = "model") -> Result:
    ids = [f"{of.path}/{index}" for index in range(of.rows)] if ids is None else ids
    errors = pa.array(["bad" if index == 0 else None for index in range(len(ids))], pa.string())
    table = pa.table({"id": pa.array(ids, pa.string()), "error": errors})
    return Result(unit_id=of.id, configuration=configuration, table=table)


@pytest.fixture
def destination(tmp_path: Path) -> ParquetDestination:
    made = ParquetDestination(FolderStore(tmp_path / "out"))
    made.prepare()
    for each in UNITS:
        made.commit(result(each))
    return made


def only(destination: ParquetDestination, units: list[Unit] = UNITS) -> Finding:
    found = verify(destination, units)
    assert not found.ok
    (finding,) = found.findings
    return finding


def test_complete_destination_has_no_finding(destination: ParquetDestination) -> None:
    found = verify(destination, UNITS)
    assert found.ok
    assert (found.units, found.inputs, found.scored, found.errors) == (5, 20, 15, 5)
    assert found.configurations == ("model",)


def test_missing_unit(destination: ParquetDestination) -> None:
    destination.remove([UNITS[2].id])
    finding = only(destination)
    assert (finding.unit_id, finding.place) == (UNITS[2].id, "photos/2")
    assert str(finding).endswith(
        "none of its 4 rows has a result (run the same command again: it scores what is missing)"
    )


def test_unplanned_unit(destination: ParquetDestination, tmp_path: Path) -> None:
    finding = only(destination, UNITS[1:])
    assert finding.place == str(tmp_path / "out" / f"{UNITS[0].id}.parquet")
    assert finding.message == "the plan has no such unit"
    assert "--replace" in finding.hint


def test_missing_rows(destination: ParquetDestination) -> None:
    destination.remove([UNITS[2].id])
    destination.commit(result(UNITS[2], ["photos/2/0", "photos/2/1"]))
    assert only(destination).message == "it has 1 answers and 1 errors for 4 rows"


def test_row_id_in_two_units(destination: ParquetDestination) -> None:
    destination.remove([UNITS[2].id])
    destination.commit(result(UNITS[2], ["photos/2/0", "photos/2/1", "photos/2/2", "photos/1/3"]))
    finding = only(destination)
    first, second = (UNITS[1].id, UNITS[2].id) if finding.unit_id == UNITS[2].id else (UNITS[2].id, UNITS[1].id)
    assert finding.unit_id == second
    assert finding.message == f"1 of its rows occur twice: 'photos/1/3' (also in {first})"


def test_row_id_twice_in_a_unit(destination: ParquetDestination) -> None:
    destination.remove([UNITS[2].id])
    destination.commit(result(UNITS[2], ["a", "b", "b", "c"]))
    assert only(destination).message == f"1 of its rows occur twice: 'b' (also in {UNITS[2].id})"


def test_results_of_two_models(destination: ParquetDestination) -> None:
    destination.remove([UNITS[2].id])
    destination.commit(result(UNITS[2], configuration="other"))
    finding = only(destination)
    assert finding.unit_id == UNITS[2].id
    assert finding.message == "it was computed by configuration other, most by model"
    assert verify(destination, UNITS).configurations == ("model", "other")


def test_truncated_file(destination: ParquetDestination, tmp_path: Path) -> None:
    path = tmp_path / "out" / f"{UNITS[3].id}.parquet"
    path.write_bytes(path.read_bytes()[:100])
    finding = only(destination)
    assert (finding.unit_id, finding.place) == (UNITS[3].id, str(path))
    assert "it is damaged" in finding.message
    assert finding.hint == "remove it and run the same command again"


def test_file_with_damaged_rows(destination: ParquetDestination, tmp_path: Path) -> None:
    path = tmp_path / "out" / f"{UNITS[3].id}.parquet"
    content = bytearray(path.read_bytes())
    content[4:40] = bytes(36)
    path.write_bytes(content)
    finding = only(destination)
    assert (finding.unit_id, finding.place) == (UNITS[3].id, str(path))
    assert "cannot be read" in finding.message


def test_empty_destination(tmp_path: Path) -> None:
    empty = ParquetDestination(FolderStore(tmp_path / "empty"))
    empty.prepare()
    assert len(verify(empty, UNITS).findings) == 5
    assert verify(empty, []).ok


def test_numeric_row_ids(tmp_path: Path) -> None:
    made = ParquetDestination(FolderStore(tmp_path / "numbers"))
    made.prepare()
    units = [unit(0, 2), unit(1, 2)]
    for each, ids in zip(units, ([1, 2], [3, 1]), strict=True):
        table = pa.table({"id": ids, "error": pa.nulls(2, pa.string())})
        made.commit(Result(unit_id=each.id, configuration="model", table=table))
    (finding,) = verify(made, units).findings
    assert "1 (also in" in finding.message
