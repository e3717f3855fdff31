"""Functions of a model in Ray Data and Spark give the rows that `graphkiln score` writes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import manual
import pytest
from scoring_runs import make_images, results

from graphkiln.scoring import score

ROWS, BAD = 60, (0, 7)
SPARK = "pyspark==4.3.0"

# Two processes of Ray, or of Spark: each with its own session. Prints a row per line.
ON_RAY = """
import json, sys, ray
from pathlib import Path
from graphkiln.scoring import udf

if __name__ == "__main__":
    model, folder, cache = sys.argv[1:]
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, object_store_memory=80 * 2**20)
    classify = udf(model, top_k=3, cache=cache, cores_per_worker=1)
    photos = ray.data.from_items([
        {"id": path.name, "photo": path.read_bytes()} for path in sorted(Path(folder).iterdir())
    ], override_num_blocks=2)
    pool = ray.data.ActorPoolStrategy(size=2)
    for row in classify.ray(photos, batch_size=15, compute=pool, num_cpus=0.5).drop_columns(["photo"]).take_all():
        print("row", json.dumps(row))
"""
ON_SPARK = """
import json, sys
from pathlib import Path
from pyspark.sql import SparkSession
from graphkiln.scoring import udf

if __name__ == "__main__":
    model, folder, cache = sys.argv[1:]
    settings = {"spark.ui.enabled": "false", "spark.driver.host": "127.0.0.1", "spark.driver.bindAddress": "127.0.0.1"}
    spark = SparkSession.builder.master("local[2]").config(map=settings).getOrCreate()
    classify = udf(model, top_k=3, cache=cache, cores_per_worker=1)
    photos = [(path.name, path.read_bytes()) for path in sorted(Path(folder).iterdir())]
    frame = spark.createDataFrame(photos, "id string, photo binary").repartition(2)
    for row in frame.select("id", classify.spark("photo", batch_size=15).alias("answer")).collect():
        print("row", json.dumps({"id": row["id"], **row["answer"].asDict(recursive=True)}))
    spark.stop()
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_images(tmp_path_factory.mktemp("source") / "images", ROWS, dict.fromkeys(BAD, b"no image"))


def rows_of(program: str, *arguments: Path, **environment: str) -> list[dict[str, Any]]:
    command = [sys.executable, "-c", program, *map(str, arguments)]
    done = subprocess.run(
        command, env=os.environ | environment, capture_output=True, text=True, timeout=900, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    printed = [line.removeprefix("row ") for line in done.stdout.splitlines() if line.startswith("row ")]
    return sorted(map(json.loads, printed), key=lambda row: str(row["id"]))


def check_equal(found: list[dict[str, Any]], folder: Path, model: Path, out: Path, cache: Path) -> None:
    """Batches of other sizes may change the last bits; tests/unit/scoring/test_functions.py compares equal ones."""
    score(folder, model=model, out=out, top_k=3, cache=cache, cores_per_worker=1, workers=1)
    expected = results(out).to_pylist()
    assert [row["id"] for row in expected if row["error"]] == [f"{row:05}.png" for row in BAD]
    for row, wanted in zip(found, expected, strict=True):
        assert row.pop("scores") == (wanted["scores"] and pytest.approx(wanted["scores"], rel=1e-5))
        assert row == {name: value for name, value in wanted.items() if name != "scores"}


@pytest.mark.wide
def test_ray_data(folder: Path, digits: Path, tmp_path: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="ray", dir="/tmp") as ray:  # its sockets allow no long path
        environment = {"RAY_TMPDIR": ray, "RAY_AUTH_TOKEN": "0" * 64}  # without a token, Ray writes one into the home
        found = rows_of(ON_RAY, digits, folder, tmp_path / "cache", **environment)
    check_equal(found, folder, digits, tmp_path / "out", tmp_path / "cache")


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Folder with PySpark, which has 500 MB and is in no extra. It needs Java: apt-get install default-jre-headless."""
    folder = tmp_path_factory.mktemp("pyspark")
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--target", folder, SPARK]
    subprocess.run(command, check=True, timeout=600)
    return str(folder)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_spark(spark: str, folder: Path, digits: Path, tmp_path: Path, repository: Path) -> None:
    environment = {"PYTHONPATH": spark, "PYSPARK_PYTHON": sys.executable, "SPARK_LOCAL_DIRS": str(tmp_path / "spark")}
    found = rows_of(ON_SPARK, digits, folder, tmp_path / "cache", **environment)
    check_equal(found, folder, digits, tmp_path / "out", tmp_path / "cache")
    blocks = {block.title: block.text for block in manual.blocks(repository / "docs" / "how-to" / "data-frames.md")}
    for name in ("photos.py", "classify_with_spark.py"):
        (tmp_path / name).write_text(blocks[name])
    for name in ("docs", "model_repository"):
        (tmp_path / name).symlink_to(repository / name)
    done = subprocess.run(
        [sys.executable, "classify_with_spark.py"],
        cwd=tmp_path,
        env=os.environ | environment | {"SPARK_LOCAL_IP": "127.0.0.1"},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert "seven" in done.stdout, done.stderr[-4000:]
