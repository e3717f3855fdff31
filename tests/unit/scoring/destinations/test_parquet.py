"""A store of Parquet files: one per unit, whole, once."""

from __future__ import annotations

import stat
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from graphkiln_backend.scoring.destinations.base import Result
from graphkiln_backend.scoring.destinations.folder import FolderStore
from graphkiln_backend.scoring.destinations.parquet import ParquetDestination
from graphkiln_backend.scoring.errors import ScoringError

A, B = "a" * 32, "b" * 32


def result(unit_id: str = A, ids: tuple[str, ...] = ("x", "y", "z"), errors: tuple[int, ...] = (1,)) -> Result:
    words = [f"no image: {index}" if index in errors else None for index in range(len(ids))]
    scores = [None if word else [0.5] for word in words]
    columns = {"id": pa.array(ids, pa.string()), "scores": pa.array(scores, pa.list_(pa.float32()))}
    table = pa.table(columns | {"error": pa.array(words, pa.string())})
    return Result(unit_id=unit_id, configuration="model", table=table)


@pytest.fixture
def destination(tmp_path: Path) -> ParquetDestination:
    made = ParquetDestination(FolderStore(tmp_path / "out"))
    made.prepare()
    return made


def test_file_modes_follow_the_umask(destination: ParquetDestination, tmp_path: Path) -> None:
    destination.commit(result())
    destination.notes.replace("_run.json", memoryview(b"1"))
    (tmp_path / "touched").touch()
    expected = stat.S_IMODE((tmp_path / "touched").stat().st_mode)
    assert {stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "out").iterdir()} == {expected}


def test_foreign_parquet_files_are_refused(destination: ParquetDestination, tmp_path: Path) -> None:
    pq.write_table(pa.table({"id": ["x"]}), tmp_path / "out" / "other.parquet")
    with pytest.raises(ScoringError, match=r"other.parquet is no result.*choose an empty destination"):
        destination.prepare()


class TestDamage:
    """Damaged files are described as such, beside the others."""

    def described(self, destination: ParquetDestination) -> dict[str, str]:
        return {one.unit_id: one.damage for one in destination.describe([A, B])}

    def test_truncated_file(self, destination: ParquetDestination, tmp_path: Path) -> None:
        destination.commit(result())
        destination.commit(result(B))
        path = tmp_path / "out" / f"{A}.parquet"
        path.write_bytes(path.read_bytes()[:-20])
        damage = self.described(destination)
        assert damage[A]
        assert not damage[B]
        with pytest.raises(ScoringError, match=f"{A}.parquet cannot be read"):
            destination.read(A, ["id"])

    def test_file_of_another_unit(self, destination: ParquetDestination, tmp_path: Path) -> None:
        destination.commit(result())
        (tmp_path / "out" / f"{B}.parquet").write_bytes((tmp_path / "out" / f"{A}.parquet").read_bytes())
        assert "does not hold the result of the unit" in self.described(destination)[B]

    def test_contradicting_counts(self, destination: ParquetDestination, tmp_path: Path) -> None:
        destination.commit(result())
        path = tmp_path / "out" / f"{A}.parquet"
        table = pq.read_table(path)
        metadata = {**(table.schema.metadata or {}), b"graphkiln.errors": b"0"}
        pq.write_table(table.replace_schema_metadata(metadata), path)
        assert self.described(destination)[A] == "its metadata has 0 rows with an error, its data 1"


def test_schema_metadata_of_the_input_is_dropped(destination: ParquetDestination, tmp_path: Path) -> None:
    one = result()
    destination.commit(
        Result(unit_id=A, configuration="m", table=one.table.replace_schema_metadata({"pandas": "large"}))
    )
    assert b"pandas" not in (pq.read_metadata(tmp_path / "out" / f"{A}.parquet").metadata or {})
