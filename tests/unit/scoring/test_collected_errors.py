"""The collected errors: every row with an error once, with its reason."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from graphkiln.scoring.record import collect_errors
from graphkiln_backend.scoring.destinations.base import Result
from graphkiln_backend.scoring.destinations.folder import FolderStore
from graphkiln_backend.scoring.destinations.parquet import ParquetDestination


def commit(destination: ParquetDestination, unit_id: str, errors: list[str | None]) -> None:
    ids = [f"{unit_id[0]}{index}" for index in range(len(errors))]
    table = pa.table({"id": ids, "error": pa.array(errors, pa.string())})
    destination.commit(Result(unit_id=unit_id, configuration="model", table=table))


def test_all_errors_of_all_units(tmp_path: Path) -> None:
    destination = ParquetDestination(FolderStore(tmp_path))
    destination.prepare()
    assert collect_errors(destination, destination.committed_ids()) == 0
    assert pq.read_table(tmp_path / "_errors.parquet").num_rows == 0
    commit(destination, "a" * 32, [None, "no image", "too large"])
    commit(destination, "b" * 32, [None])
    commit(destination, "c" * 32, ["quarantined"])
    assert collect_errors(destination, destination.committed_ids()) == 3
    rows = pq.read_table(tmp_path / "_errors.parquet").to_pylist()
    assert sorted((row["id"], row["unit"][0], row["reason"]) for row in rows) == [
        ("a1", "a", "no image"),
        ("a2", "a", "too large"),
        ("c0", "c", "quarantined"),
    ]
    assert pq.read_table(tmp_path).num_rows == 5
