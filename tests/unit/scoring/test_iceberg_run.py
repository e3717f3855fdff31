"""Whole runs from one Iceberg table to another: the snapshot of the run, and kills of the driver at random moments."""

from __future__ import annotations

import io
import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import inline_fleet
import numpy as np
import pyarrow as pa
import pytest
from iceberg_tables import catalog_variables, open_catalog
from PIL import Image
from pyiceberg.catalog import Catalog
from scoring_runs import REPOSITORY

from graphkiln.scoring.running import score, verify
from graphkiln_backend.graph.errors import GraphkilnError
from graphkiln_backend.scoring.destinations.iceberg import PROPERTY, IcebergDestination
from graphkiln_backend.scoring.errors import ScoringError

PHOTOS, ANSWERS = "iceberg:lake/shop.photos", "iceberg:lake/shop.answers"
MODEL = REPOSITORY / "model_repository" / "digits"
SCHEMA = pa.schema([("id", pa.string()), ("image", pa.binary()), ("price", pa.int32())])
OPTIONS: dict[str, Any] = {"id_column": "id", "keep_columns": "price", "rows_per_unit": 2}


def photos(first: int, count: int) -> pa.Table:
    images = []
    for number in range(first, first + count):
        content = io.BytesIO()
        pixels = np.random.default_rng(number).integers(0, 255, (8, 8), np.uint8)
        Image.fromarray(pixels).save(content, "png")
        images.append(content.getvalue())
    numbers = range(first, first + count)
    return pa.table([[f"photo-{number}" for number in numbers], images, list(numbers)], schema=SCHEMA)


@pytest.fixture
def catalog(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Catalog:
    made = open_catalog(tmp_path / "lake", monkeypatch)
    table = made.create_table("shop.photos", SCHEMA)
    table.append(photos(0, 4))
    table.append(photos(4, 2))
    return made


@pytest.fixture
def inline(monkeypatch: pytest.MonkeyPatch) -> None:
    inline_fleet.install(monkeypatch)


def run(**options: Any) -> Any:
    return score(PHOTOS, model=MODEL, out=ANSWERS, **{**OPTIONS, **options})


def answered(catalog: Catalog) -> list[str]:
    return sorted(catalog.load_table("shop.answers").scan().to_arrow().column("id").to_pylist())


def names(first: int, count: int) -> list[str]:
    return sorted(f"photo-{number}" for number in range(first, first + count))


@pytest.mark.usefixtures("inline")
def test_run_verified_interrupted_resumed_and_continued(catalog: Catalog, monkeypatch: pytest.MonkeyPatch) -> None:
    first = catalog.load_table("shop.photos").current_snapshot()
    assert first is not None

    def interrupt(*_: object) -> None:
        raise ScoringError("the catalog is down")

    with monkeypatch.context() as broken:
        broken.setattr(IcebergDestination, "publish", interrupt)
        with pytest.raises(ScoringError, match="the catalog is down"):
            run()
    assert answered(catalog) == []
    catalog.load_table("shop.photos").append(photos(6, 2))
    record = run()
    assert record.request["snapshot"] == str(first.snapshot_id), "the run goes on with the snapshot of its start"
    assert (record.figures.units_before, record.figures.units_done, record.figures.rows) == (3, 0, 6)
    assert answered(catalog) == names(0, 6)
    read = catalog.load_table("shop.answers").scan().to_arrow()
    assert read.column_names == ["id", "price", "indices", "labels", "scores", "model", "version", "error"]
    assert sorted(read.column("price").to_pylist()) == list(range(6))
    assert verify(ANSWERS).ok

    record = run()
    assert record.request["snapshot"] != str(first.snapshot_id), "it was finished: this is a new run"
    assert (record.figures.units_before, record.figures.scored) == (3, 2)
    assert answered(catalog) == names(0, 8)
    assert verify(ANSWERS).ok
    assert len(catalog.load_table("shop.answers").snapshots()) == 2

    catalog.load_table("shop.photos").overwrite(photos(5, 4))
    with pytest.raises(ScoringError, match="--replace removes them"):
        run()
    run(replace=True)
    assert answered(catalog) == names(5, 4)
    assert verify(ANSWERS).ok


@pytest.mark.wide
@pytest.mark.usefixtures("inline")
def test_snapshot_that_vanished_is_named_and_nothing_is_written(
    catalog: Catalog, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as broken:
        broken.setattr(IcebergDestination, "publish", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            run()
    table = catalog.load_table("shop.photos")
    gone = table.current_snapshot()
    assert gone is not None
    table.append(photos(6, 2))
    table.maintenance.expire_snapshots().by_id(gone.snapshot_id).commit()
    with pytest.raises(ScoringError, match=f"has no snapshot {gone.snapshot_id}: it was expired") as refused:
        run()
    assert answered(catalog) == []
    newest = refused.value.hint.partition("the newest one is ")[2].partition(";")[0]
    score(newest, model=MODEL, out=ANSWERS, **OPTIONS, replace=True)
    assert answered(catalog) == names(0, 8)


def test_bad_input_writes_nothing(catalog: Catalog) -> None:
    for source, options, words in (
        ("iceberg:lake/shop.nope", {}, "there is no table"),
        ("iceberg:nope/shop.photos", {}, "no catalog named"),
        (PHOTOS, {"keep_columns": "nope"}, "has no column 'nope'"),
        (PHOTOS, {"format": "delta"}, "does not apply to Iceberg"),
        (PHOTOS, {"ledger": "postgresql://h/db"}, "leave out --ledger"),
        (f"{ANSWERS}@5", {}, "is both source and destination"),
    ):
        with pytest.raises(GraphkilnError, match=words):
            score(source, model=MODEL, out=ANSWERS, **{**OPTIONS, **options})
    assert [name[-1] for name in catalog.list_tables("shop")] == ["photos"]


DRIVER = """
import sys
import pytest
import inline_fleet
from graphkiln.scoring.running import score
from graphkiln_backend.scoring.destinations.iceberg import IcebergDestination

inline_fleet.install(pytest.MonkeyPatch())
publish = IcebergDestination.publish

def tell(self, *arguments):
    print("publishing", flush=True)
    publish(self, *arguments)
    print("published", flush=True)

IcebergDestination.publish = tell
source, model, out = sys.argv[1:4]
score(source, model=model, out=out, id_column="id", keep_columns="price", rows_per_unit=2)
"""
KILLS = 30


def drive(out: str, environment: dict[str, str]) -> subprocess.Popen[str]:
    command = [sys.executable, "-W", "ignore", "-c", DRIVER, PHOTOS, str(MODEL), out]
    return subprocess.Popen(command, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_driver_killed_at_random_moments(catalog: Catalog, tmp_path: Path) -> None:
    """A third of the moments is in the whole run, the others are in the commit. The input grows after each kill."""
    path = f"{REPOSITORY / 'tests' / 'support'}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    environment = {**os.environ, **catalog_variables(tmp_path / "lake"), "PYTHONPATH": path}
    begun = time.monotonic()
    with drive("iceberg:lake/shop.measured", environment) as whole:
        assert whole.stdout
        whole.stdout.readline()
        before_commit = time.monotonic()
        whole.stdout.readline()
        commit_s = time.monotonic() - before_commit
        assert whole.wait() == 0, whole.stderr and whole.stderr.read()
    run_s = time.monotonic() - begun
    chance = random.Random(42)
    landed = 0
    for kill in range(KILLS):
        name = f"shop.killed{kill}"
        with drive(f"iceberg:lake/{name}", environment) as victim:
            assert victim.stdout
            if kill % 3:
                assert victim.stdout.readline() == "publishing\n"
                time.sleep(chance.uniform(0, 1.2 * commit_s))
            else:
                time.sleep(chance.uniform(0.2 * run_s, run_s))
            victim.kill()
        catalog.load_table("shop.photos").append(photos(1000 + kill, 1))
        tables = [each[-1] for each in catalog.list_tables("shop")]
        is_there = name.partition(".")[2] in tables
        landed += is_there and bool(catalog.load_table(name).snapshots())
        # A driver that was killed after it had finished: the next one reads the row that was added.
        is_finished = is_there and (notes(catalog, name) / "_run.json").exists() and not pinned(catalog, name)
        with drive(f"iceberg:lake/{name}", environment) as next_one:
            _, errors = next_one.communicate()
        assert next_one.returncode == 0, errors
        check_once(catalog, name, runs=2 if is_finished else 1)
    assert 0 < landed < KILLS, "kills before and after the commit"


def notes(catalog: Catalog, name: str) -> Path:
    return Path(catalog.load_table(name).location().removeprefix("file://")) / "_graphkiln"


def pinned(catalog: Catalog, name: str) -> bool:
    return (notes(catalog, name) / "_snapshot.json").exists()


def check_once(catalog: Catalog, name: str, runs: int) -> None:
    table = catalog.load_table(name)
    snapshot = int(json.loads((notes(catalog, name) / "_run.json").read_text())["request"]["snapshot"])
    scan = catalog.load_table("shop.photos").scan(snapshot_id=snapshot, selected_fields=("id",))
    found = table.scan().to_arrow()
    assert sorted(found.column("id").to_pylist()) == sorted(scan.to_arrow().column("id").to_pylist())
    assert len([each for each in table.snapshots() if each.summary and each.summary[PROPERTY]]) == runs
    assert verify(f"iceberg:lake/{name}").ok
