"""`graphkiln segment`: table, JSON, CSV and drawings."""

from __future__ import annotations

import csv
import io
import json
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from commands import FakeClient, RunVerb
from PIL import Image

from graphkiln_client import SegmentedImage


@pytest.fixture
def image(tmp_path: Path, client: FakeClient) -> Path:
    Image.new("RGB", (40, 20)).save(tmp_path / "a.png")
    classes = np.zeros((20, 40), np.uint8)
    classes[:, 30:] = 1
    client.fake_model.answers = {"a.png": SegmentedImage(classes=classes, labels=("background", "sky"), unseen=255)}
    return tmp_path / "a.png"


def test_table(run: RunVerb, image: Path) -> None:
    out = run("segment", image, "--model", "m").out
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in out.splitlines() if "│" in line]
    assert rows == [["a.png", "background", "0", "75.0 %"], ["", "sky", "1", "25.0 %"]]


def test_json_has_run_lengths(run: RunVerb, image: Path) -> None:
    (row,) = json.loads(run("segment", image, "--model", "m", "--json").out)
    assert (row["height"], row["width"]) == (20, 40)
    assert row["segments"][1] == {
        "label": "sky",
        "index": 1,
        "share": 0.25,
        "mask": {"size": [20, 40], "counts": [600, 200]},
    }


def test_csv(run: RunVerb, image: Path) -> None:
    rows = list(csv.DictReader(io.StringIO(run("segment", image, "--model", "m", "--csv").out)))
    assert [(row["label"], row["share"]) for row in rows] == [("background", "0.75"), ("sky", "0.25")]


def test_drawing(run: RunVerb, image: Path) -> None:
    assert run("segment", image, "--model", "m", "--draw", image.parent / "x.png").code == 0
    drawn = np.asarray(Image.open(image.parent / "x.png"))
    assert drawn[18, 35].any()
    assert not drawn[18, 5].any()  # the background is not tinted


def test_class_maps_are_not_accumulated(
    run: RunVerb, image: Path, client: FakeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[weakref.ref[Any]] = []

    def segment_many(images: list[Path], **_: Any) -> Iterator[SegmentedImage]:
        for _image in images:
            classes = np.zeros((20, 40), np.uint8)
            assert sum(each() is not None for each in made) < 2
            made.append(weakref.ref(classes))
            yield SegmentedImage(classes=classes, labels=("background",), unseen=255)

    monkeypatch.setattr(client.fake_model, "segment_many", segment_many)
    for name in ("b.png", "c.png", "d.png"):
        Image.new("RGB", (40, 20)).save(image.parent / name)
    assert len(json.loads(run("segment", image.parent, "--model", "m", "--json").out)) == len(made) == 4
