"""The committed detector on a real server: equal results over every transport, in pixels of the image."""

from __future__ import annotations

import io
import json
import re
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from running import Server, Serving, run_command

from graphkiln.story.digits import digit_image
from graphkiln_backend.graph.errors import InvalidInput
from graphkiln_backend.graph.image_model import ACCEPT_IMAGES_LINE
from graphkiln_client import Client, Detection
from training.scenes import Scene, compose_scenes, digit_rows

pytestmark = [pytest.mark.server, pytest.mark.slow]

NAME = "scenes-detector"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, repository: Path) -> Iterator[Server]:
    """Server of the example detector, which accepts images."""
    folder = tmp_path_factory.mktemp("detector")
    shutil.copytree(repository / "model_repository" / NAME, folder / "store" / NAME)
    with (folder / "store" / NAME / "config.pbtxt").open("a") as config:
        config.write(ACCEPT_IMAGES_LINE)
    with Serving(folder, "--model-store", folder / "store") as running:
        running.wait_ready()
        yield running


@pytest.fixture(scope="module")
def scenes() -> list[Scene]:
    return compose_scenes(12, seed=11, held_out=True)


def encoded(pixels: Any, kind: str = "PNG", **options: Any) -> bytes:
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, kind, **options)
    return file.getvalue()


def overlap(found: Detection, box: Any) -> float:
    x1, y1, x2, y2 = box
    across = min(found.box.x2, x2) - max(found.box.x1, x1)
    down = min(found.box.y2, y2) - max(found.box.y1, y1)
    shared = max(across, 0) * max(down, 0)
    area = (found.box.x2 - found.box.x1) * (found.box.y2 - found.box.y1)
    return float(shared / (area + (x2 - x1) * (y2 - y1) - shared))


def count_right(found: tuple[Detection, ...], scene: Scene, scale: float = 1) -> int:
    """Number of digits of a scene that were found with the right value."""
    pairs = zip(scene.boxes * scale, scene.classes, strict=True)
    return sum(any(each.index == value and overlap(each, box) > 0.5 for each in found) for box, value in pairs)


@pytest.mark.parametrize("scale", [1, 5])
def test_finds_the_digits_in_pixels_of_the_image(server: Server, scenes: list[Scene], scale: int) -> None:
    images = [Image.fromarray(scene.pixels).resize((96 * scale, 96 * scale)) for scene in scenes]
    with Client(server.url) as client:
        found = list(client.model(NAME).detect_many(images))
    right = sum(count_right(each, scene, scale) for each, scene in zip(found, scenes, strict=True))  # type: ignore[arg-type]
    assert right >= 0.9 * sum(len(scene.classes) for scene in scenes)


@pytest.mark.parametrize("url", ["url", "grpc_url"])
def test_encoded_images_give_the_same_bits(server: Server, scenes: list[Scene], url: str) -> None:
    files = [encoded(scene.pixels) for scene in scenes]
    with Client(getattr(server, url)) as client, client.shared_memory() as shared:
        for source in (client, shared):
            one, other = (source.model(NAME, images=form) for form in ("encoded", "tensor"))
            assert [one.detect(file) for file in files] == [other.detect(file) for file in files]


def test_odd_and_damaged_images_among_good_ones(server: Server, scenes: list[Scene]) -> None:
    scene, turned = scenes[0], Image.Exif()
    turned[0x0112] = 6
    good = encoded(scene.pixels)
    long = Image.fromarray(scene.pixels).resize((8000, 96))
    files = [good, good[:-500], encoded(np.zeros((1, 1), np.uint8)), b"?", encoded(np.asarray(long), "JPEG"),
             encoded(np.rot90(scene.pixels), exif=turned)]  # fmt: skip
    with Client(server.url) as client:
        by_form = [
            list(client.model(NAME, images=form).detect_many(files, on_error="return", batch_size=6))
            for form in ("encoded", "tensor", "auto")
        ]
    for found in by_form:
        assert [isinstance(each, InvalidInput) for each in found] == [False, True, False, True, False, False]
        # The camera was turned: upright, it is the first scene.
        assert found[5] == found[0]
        assert all(each.box.x2 <= 8000 for each in found[4])  # type: ignore[union-attr]
        assert max(each.box.x2 for each in found[4]) > 4000  # type: ignore[union-attr]
        np.testing.assert_allclose(_boxes(found[0]), _boxes(by_form[1][0]), atol=1e-3)
        np.testing.assert_allclose(_boxes(found[4]), _boxes(by_form[1][4]), atol=0.1)


def _boxes(found: Any) -> Any:
    return [(each.box.x1, each.box.y1, each.box.x2, each.box.y2) for each in found]


def test_command_of_the_guide(server: Server, repository: Path, tmp_path: Path) -> None:
    guide = (repository / "docs" / "how-to" / "requests.md").read_text()
    (line,) = re.findall(r"^graphkiln (detect .*)", guide, re.MULTILINE)
    verb, images, *options = shlex.split(line.replace("--draw found", f"--draw {tmp_path / 'found'}"))
    finished = run_command(verb, repository / images, *options, "--url", server.url)
    assert finished.returncode == 0, finished.stderr
    assert "│ 1.png" in finished.stdout
    assert "eight" in finished.stdout
    assert sorted(path.name for path in (tmp_path / "found").iterdir()) == ["1.png", "2.png", "3.png"]


def test_command_line(server: Server, repository: Path) -> None:
    shown = [
        run_command("detect", repository / "docs" / "scenes", "--model", NAME, "--url", server.url, "--json", flag)
        for flag in ("--encoded", "--tensor")
    ]
    rows = json.loads(shown[0].stdout)
    assert [[each["label"] for each in row["detections"]] for row in rows] == [
        ["eight", "eight", "three", "eight"], ["one", "two", "seven"], ["one", "zero", "two", "six"],
    ]  # fmt: skip
    assert [len(row["detections"]) for row in json.loads(shown[1].stdout)] == [4, 3, 4]


def test_best_detections_if_there_are_more_than_rows(server: Server) -> None:
    """36 digits of 16 pixels: the graph returns 16 rows."""
    crowd = np.full((96, 96), 30, np.uint8)
    digits = [np.asarray(digit_image(digit, 16)) for digit in digit_rows(held_out=True)[0][:36]]
    for place, ink in enumerate(digits):
        top, left = divmod(place, 6)
        crowd[16 * top : 16 * top + 16, 16 * left : 16 * left + 16] = 30 + ink.astype(np.float64) / ink.max() * 150
    found = []
    for form in ("encoded", "tensor"):
        with Client(server.url) as client:
            found.append(client.model(NAME, images=form).detect(encoded(crowd), score_threshold=0.0))
    assert found[0] == found[1]
    scores = [each.score for each in found[0]]
    assert len(scores) == 16
    assert scores == sorted(scores, reverse=True)
