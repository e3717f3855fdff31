"""`graphkiln detect`: table, JSON, CSV and drawings."""

from __future__ import annotations

import csv
import io
import json
import os
from pathlib import Path

import numpy as np
import pytest
from commands import FakeClient, RunVerb
from PIL import Image

from graphkiln_backend.graph.errors import InvalidInput
from graphkiln_client import Box, Detection

FOUND = (
    Detection(box=Box(8, 4, 24, 16), label="[red]cat[/]", index=3, score=0.75),
    Detection(box=Box(0, 0, 32, 20), label="", index=5, score=0.5),
)


@pytest.fixture
def images(tmp_path: Path, client: FakeClient) -> Path:
    for name in ("a.png", "b.png"):
        Image.new("RGB", (32, 20)).save(tmp_path / name)
    client.fake_model.answers = {"a.png": FOUND, "b.png": ()}
    return tmp_path


def test_table(run: RunVerb, images: Path) -> None:
    out = run("detect", images, "--model", "m").out
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in out.splitlines() if "│" in line]
    assert rows[0] == ["a.png", "[red]cat[/]", "0.7500", "8.0", "4.0", "24.0", "16.0"]
    assert rows[1][:2] == ["", "5"]
    assert rows[2][:2] == ["b.png", "nothing found"]


def test_json(run: RunVerb, images: Path) -> None:
    first, second = json.loads(run("detect", images, "--model", "m", "--json").out)
    assert first["detections"][0] == {"label": "[red]cat[/]", "index": 3, "score": 0.75, "box": [8, 4, 24, 16]}
    assert (Path(second["source"]).name, second["detections"]) == ("b.png", [])


def test_csv(run: RunVerb, images: Path) -> None:
    rows = list(csv.DictReader(io.StringIO(run("detect", images, "--model", "m", "--csv").out)))
    assert [(row["rank"], row["index"], row["x2"]) for row in rows] == [("1", "3", "24"), ("2", "5", "32")]


def test_options(run: RunVerb, client: FakeClient, images: Path) -> None:
    run("detect", images, "--model", "m", "--version", "9", "--threshold", "0.25", "--batch-size", "3")
    assert client.models_opened == [("m", "9")]
    assert (client.fake_model.options["score_threshold"], client.fake_model.options["batch_size"]) == (0.25, 3)


def test_drawings_of_several_images(run: RunVerb, images: Path) -> None:
    assert run("detect", images, "--model", "m", "--draw", images / "out").code == 0
    drawn = np.asarray(Image.open(images / "out" / "a.png"))
    assert drawn.shape == (20, 32, 3)
    assert drawn[15, 23].any()  # the corner of the box
    assert not np.asarray(Image.open(images / "out" / "b.png")).any()


def test_drawing_of_one_image(run: RunVerb, images: Path) -> None:
    assert run("detect", images / "a.png", "--model", "m", "--draw", images / "x.jpg").code == 0
    assert (images / "x.jpg").read_bytes().startswith(b"\xff\xd8")
    finished = run("detect", images, "--model", "m", "--draw", images / "x.png")
    assert (finished.code, "name a folder" in finished.err) == (2, True)


def test_one_failed_image(run: RunVerb, client: FakeClient, images: Path) -> None:
    del client.fake_model.answers["b.png"]
    client.fake_model.error = InvalidInput("damaged")
    finished = run("detect", images, "--model", "m", "--json")
    assert finished.code == 1
    assert "b.png: damaged" in finished.err
    assert len(json.loads(finished.out)) == 1


def test_drawings_of_images_with_the_same_name(run: RunVerb, images: Path) -> None:
    (images / "more").mkdir()
    Image.new("RGB", (32, 20)).save(images / "more" / "a.png")
    assert run("detect", images, "--model", "m", "--draw", images / "out").code == 0
    drawn = sorted(str(path.relative_to(images / "out")) for path in (images / "out").rglob("*.png"))
    assert drawn == ["a.png.png", "b.png.png", "more/a.png.png"]


def test_images_are_not_overwritten(run: RunVerb, images: Path) -> None:
    before = (images / "a.png").read_bytes()
    finished = run("detect", images, "--model", "m", "--draw", images)
    assert (finished.code, "would overwrite" in finished.err) == (2, True)
    assert (images / "a.png").read_bytes() == before


def test_undecodable_file_name_in_csv(run: RunVerb, images: Path, client: FakeClient) -> None:
    odd = images / os.fsdecode(b"odd-\xff,\n.png")
    (images / "a.png").rename(odd)
    client.fake_model.answers[odd.name] = FOUND
    rows = list(csv.DictReader(io.StringIO(run("detect", odd, "--model", "m", "--csv").out)))
    assert [row["label"] for row in rows] == ["[red]cat[/]", ""]
    assert rows[0]["source"].endswith("odd-\\udcff,\n.png")
