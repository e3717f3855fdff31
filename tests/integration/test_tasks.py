"""Detection, segmentation and embedding on a real server: both clients, both protocols, the command line."""

from __future__ import annotations

import asyncio
import io
import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from light_boxes import BOXES, IMAGES, TASKS, write_store
from PIL import Image
from pyarrow import parquet
from running import StartServer, run_here

from graphkiln_backend.cache.store import ArtifactCache
from graphkiln_backend.scoring.messages import Row, ScoreRequest
from graphkiln_backend.scoring.model import read_model
from graphkiln_client import AsyncClient, Client

pytestmark = [pytest.mark.server, pytest.mark.slow]


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return write_store(tmp_path)


def check_blocking(url: str) -> None:
    with Client(url) as client:
        found = list(client.model("detector").detect_many([*IMAGES, b"damaged"], on_error="return"))
        assert [[each.box for each in row] for row in found[:4]] == [[box] if box else [] for box in BOXES]
        assert "cannot" in str(found[4]) or "not an image" in str(found[4])
        assert found[0][0].label == "light"
        areas = client.model("segmenter").segment(IMAGES[1])
        assert areas.classes.shape == (128, 32)
        assert areas.classes[20:60, 10:22].all()
        assert not areas.classes[70:].any()
        np.testing.assert_allclose(client.model("embedder").embed(IMAGES[0]), [3**-0.5] * 3, rtol=1e-5)


async def check_async(url: str) -> None:
    async with AsyncClient(url) as client:
        (found,) = await client.model("detector").detect(IMAGES[1])
        assert found.box == BOXES[1]
        assert [len(each) async for each in client.model("detector").detect_many(IMAGES)] == [1, 1, 0, 1]
        assert (await client.model("segmenter").segment(IMAGES[0])).classes.shape == (32, 64)
        assert (await client.model("embedder").embed(IMAGES[0])).shape == (3,)


def encoded(pixels: Any) -> bytes:
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def check_scored(store: Path, url: str, cache: ArtifactCache) -> None:
    """Check that `score` writes what clients get, for images of mixed sizes in one batch."""
    rows = [Row(id=str(number), load=partial(encoded, pixels)) for number, pixels in enumerate(IMAGES)]
    tables = {}
    for name in TASKS:
        request = ScoreRequest(source="in", model=store / name, destination="out", backends=frozenset({"graphkiln"}))
        model = read_model(request, cache, 1)
        proven = model.deployment.build(cache)
        with proven.session, model.scorer(proven, request, 1, cache) as scorer:
            tables[name] = scorer.answer(rows).table.to_pylist()
    with Client(url) as client:
        for row, found in zip(tables["detector"], client.model("detector").detect_many(IMAGES), strict=True):
            assert row["boxes"] == [each.to_dict()["box"] for each in found]
            assert (row["labels"], row["scores"]) == ([each.label for each in found], [each.score for each in found])
        for row, areas in zip(tables["segmenter"], client.model("segmenter").segment_many(IMAGES), strict=True):
            assert {key: row[key] for key in ("height", "width", "segments")} == areas.to_dict()
        for row, vector in zip(tables["embedder"], client.model("embedder").embed_many(IMAGES), strict=True):
            np.testing.assert_allclose(row["vector"], vector, rtol=1e-6)


def test_results_are_in_pixels_of_the_image_for_every_client(
    store: Path, start_server: StartServer, tmp_path: Path, cache: ArtifactCache
) -> None:
    Image.fromarray(IMAGES[0]).save(tmp_path / "a.png")
    server = start_server("--model-store", store)
    server.wait_ready()
    for url in (server.url, server.grpc_url):
        check_blocking(url)
        asyncio.run(check_async(url))
    check_scored(store, server.url, cache)

    drawing = tmp_path / "drawn.png"
    words = ("--model", "detector", "--url", server.url, "--json", "--draw", drawing)
    (row,) = json.loads(run_here("detect", tmp_path / "a.png", *words).stdout)
    assert row["detections"] == [{"label": "light", "index": 1, "score": 1.0, "box": [16, 8, 32, 16]}]
    with Image.open(drawing) as drawn:
        assert drawn.size == (64, 32)
    refused = run_here("detect", tmp_path / "a.png", "--model", "segmenter", "--url", server.url)
    assert refused.returncode == 2
    assert "its task is segmentation" in refused.stderr
    refused = run_here("classify", tmp_path / "a.png", "--model", "detector", "--url", server.url)
    assert refused.returncode == 2
    assert "'detector' cannot classify: its task is detection (use detect" in refused.stderr


def test_vectors_are_written(store: Path, start_server: StartServer, tmp_path: Path) -> None:
    """The vector of a plain color is the color, divided by its length."""
    colors = {"red": (255, 0, 0), "rose": (255, 64, 64), "gray": (90, 90, 90), "blue": (0, 0, 255), "dim": (128, 0, 0)}
    photos = tmp_path / "photos"
    photos.mkdir()
    for name, color in colors.items():
        Image.new("RGB", (32, 32), color).save(photos / f"{name}.png")
    (photos / "damaged.png").write_bytes(b"damaged")
    server = start_server("--model-store", store)
    server.wait_ready()
    vectors, url = tmp_path / "vectors.parquet", ("--url", server.url)

    written = run_here("embed", photos, "--model", "embedder", "--out", vectors, "--batch-size", "2", *url)
    assert written.returncode == 1
    assert f"{photos / 'damaged.png'} is not an image" in written.stderr
    table = parquet.read_table(vectors)
    names = [Path(source).stem for source in table.column("source").to_pylist()]
    assert names == sorted(colors)
    expected = np.array([colors[name] for name in names], np.float64)
    expected /= np.linalg.norm(expected, axis=1, keepdims=True)
    np.testing.assert_allclose(table.column("vector").to_pylist(), expected, atol=1e-5)
    assert table.schema.metadata[b"graphkiln.version"] == b"1"
    assert table.schema.metadata[b"graphkiln.contract"]
