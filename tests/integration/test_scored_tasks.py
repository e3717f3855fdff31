"""`graphkiln score` on Ray with a detector, a segmenter and an embedding: results equal those of a server's clients."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from light_boxes import IMAGES, write_store
from odd_images import damaged_files, odd_files
from PIL import Image
from pyarrow import parquet
from ray_cluster import ray_nodes
from running import StartServer, run_command
from tiny_detectors import SIDE

from graphkiln_client import Client
from graphkiln_converters.convert import convert
from graphkiln_converters.recipe import Recipe

pytestmark = [pytest.mark.server, pytest.mark.slow, pytest.mark.filterwarnings("ignore::ResourceWarning")]
MODELS = ("finder", "segmenter", "embedder")


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """The models of `light_boxes`, and a real SSD with random weights, `finder`."""
    store = write_store(tmp_path)
    convert(
        Recipe(
            source="python:tiny_detectors:batched_ssd",
            name="finder",
            model_store=store,
            task="detection",
            shape=(f"3x{SIDE}x{SIDE}",),
            preprocess={"resize": [SIDE, SIDE], "mean": [0.485, 0.456, 0.406], "std": [0.229, 0.224, 0.225]},
        )
    )
    return store


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Images of mixed sizes, and a file that is no image."""
    (tmp_path / "photos").mkdir()
    noise = np.random.default_rng(5).integers(0, 256, (90, 50, 3), np.uint8)
    for number, pixels in enumerate([*IMAGES, noise]):
        Image.fromarray(pixels).save(tmp_path / "photos" / f"{number}.png")
    (tmp_path / "photos" / "damaged.png").write_bytes(b"damaged")
    return tmp_path / "photos"


def rows_of(folder: Path) -> dict[str, dict[str, Any]]:
    return {row["id"]: row for row in parquet.read_table(folder).to_pylist()}


def check_detections(rows: dict[str, dict[str, Any]], model: Any, photos: Path) -> int:
    count = 0
    for name, row in rows.items():
        found = model.detect(photos / name)
        assert row["indices"] == [each.index for each in found]
        np.testing.assert_allclose(row["scores"], [each.score for each in found], rtol=1e-5)
        boxes = [each.to_dict()["box"] for each in found]
        np.testing.assert_allclose(np.reshape(row["boxes"], (-1, 4)), np.reshape(boxes, (-1, 4)), atol=1e-3)
        count += len(found)
    return count


def test_results_equal_those_of_clients(store: Path, photos: Path, tmp_path: Path, start_server: StartServer) -> None:
    scored = {}
    with ray_nodes(1) as nodes:
        for name in MODELS:
            out = tmp_path / "scored" / name
            ran = run_command(
                "score",
                photos,
                "--model",
                store / name,
                "--out",
                out,
                "--address",
                nodes.address,
                "--rows-per-unit",
                "4",
            )
            assert ran.returncode == 0, ran.stderr
            scored[name] = rows_of(out)
            assert "not an image" in scored[name].pop("damaged.png")["error"]
            assert sorted(scored[name]) == [f"{number}.png" for number in range(5)]
    server = start_server("--model-store", store)
    server.wait_ready()
    with Client(server.url) as client:
        assert check_detections(scored["finder"], client.model("finder"), photos) > 5
        for name, row in scored["segmenter"].items():
            areas = client.model("segmenter").segment(photos / name).to_dict()
            assert {key: row[key] for key in areas} == areas
        for name, row in scored["embedder"].items():
            np.testing.assert_allclose(row["vector"], client.model("embedder").embed(photos / name), rtol=1e-6)


def test_unusual_images_equal_those_of_clients(store: Path, tmp_path: Path, start_server: StartServer) -> None:
    photos, out = tmp_path / "odd", tmp_path / "scored"
    photos.mkdir()
    for number, content in enumerate((*odd_files().values(), *damaged_files().values())):
        (photos / f"{number:02}.png").write_bytes(content)
    with ray_nodes(1) as nodes:
        ran = run_command("score", photos, "--model", store / "embedder", "--out", out, "--address", nodes.address)
        assert ran.returncode == 0, ran.stderr
    rows = rows_of(out)
    assert len(rows) == len(odd_files()) + len(damaged_files())
    server = start_server("--model-store", store)
    server.wait_ready()
    with Client(server.url) as client:
        for number, name in enumerate(sorted(rows)):
            answers = client.model("embedder").embed_many([photos / name], on_error="return")
            (answer,) = answers
            assert (rows[name]["error"] is not None) == (number >= len(odd_files())) == isinstance(answer, Exception)
            if not isinstance(answer, Exception):
                np.testing.assert_allclose(rows[name]["vector"], answer, rtol=1e-5, atol=1e-6, err_msg=name)
