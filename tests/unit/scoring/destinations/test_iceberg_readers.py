"""What other readers than pyiceberg see in a table of results: Polars and DuckDB read Iceberg by code of their own."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
import pytest
from environments import make_environment
from iceberg_tables import open_catalog
from scoring_runs import destination_at

from graphkiln_backend.scoring.destinations.base import Result
from graphkiln_backend.scoring.messages import InputRange

PACKAGES = ("duckdb==1.5.5", "duckdb-extension-avro==1.5.5", "duckdb-extension-iceberg==1.5.5")
DUCKDB = """
import importlib.util, json, pathlib, sys
import duckdb

connection = duckdb.connect()
for name in ("avro", "iceberg"):
    package = pathlib.Path(importlib.util.find_spec(f"duckdb_extension_{name}").origin).parent
    connection.execute(f"LOAD '{next(package.rglob('*.duckdb_extension'))}'")
found = connection.execute("SELECT * FROM iceberg_scan(?) ORDER BY id", [sys.argv[1]])
names = [column[0] for column in found.description]
print(json.dumps([dict(zip(names, row)) for row in found.fetchall()]))
"""
EXPECTED = [
    {"id": f"{unit}/{row}", "scores": None if row else [0.5, 0.25], "price": unit, "error": "bad" if row else None}
    for unit in (1, 2)
    for row in range(2)
]


@pytest.fixture
def metadata(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Metadata of a table whose units were replaced in part."""
    catalog = open_catalog(tmp_path / "lake", monkeypatch)
    units = {}
    for number in range(3):
        columns = {
            "id": [f"{number}/0", f"{number}/1"],
            "scores": pa.array([[0.5, 0.25], None], pa.list_(pa.float32())),
            "price": pa.array([number] * 2, pa.uint16()),
            "error": pa.array([None, "bad"], pa.string()),
        }
        unit = InputRange(path="p", part="", identity=str(number), rows=2).unit("model")
        units[unit.id] = Result(unit_id=unit.id, configuration="model", table=pa.table(columns))
    first, *others = units
    for planned, removed in (([first, others[0]], []), (others, [first])):
        destination = destination_at("iceberg:lake/shop.answers")
        destination.declare(lambda: units[first].table.schema)
        destination.prepare()
        destination.remove(removed)
        for unit_id in set(planned) - set(destination.committed_ids()):
            destination.commit(units[unit_id])
        destination.publish(planned, lambda: None)
    return str(catalog.load_table("shop.answers").metadata_location.removeprefix("file://"))


@pytest.mark.wide
@pytest.mark.filterwarnings("ignore::polars.exceptions.PerformanceWarning")
def test_polars(metadata: str) -> None:
    found: Any = pl.scan_iceberg(metadata, reader_override="native").sort("id").collect()
    assert found.to_dicts() == EXPECTED


@pytest.mark.slow
def test_duckdb(metadata: str, tmp_path: Path) -> None:
    python = make_environment(tmp_path / "duckdb", *PACKAGES) / "python"
    done = subprocess.run([python, "-c", DUCKDB, metadata], capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == EXPECTED
