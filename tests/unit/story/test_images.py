"""The images of a story: the user's own, or held-out digits."""

from __future__ import annotations

from pathlib import Path

import pytest
from PIL import Image

from graphkiln.story.images import choose_images
from graphkiln_backend.graph.errors import InvalidInput


def test_a_folder_of_too_few_images(tmp_path: Path) -> None:
    (tmp_path / "one.jpg").write_bytes(b"")
    with pytest.raises(InvalidInput, match="holds 1 JPEGs, at least 4"):
        choose_images(tmp_path, 10)


def test_own_images_are_proven_on_some_and_calibrated_on_others(tmp_path: Path) -> None:
    for number in range(10):
        Image.new("L", (8, 8), 20 * number).save(tmp_path / f"{number}.jpg")
    chosen = choose_images(tmp_path, 10)
    assert chosen.targets is None
    assert not set(chosen.evaluation) & set(chosen.calibration)


def test_held_out_digits_are_not_calibrated_on() -> None:
    chosen = choose_images(None, 10)
    assert chosen.targets is not None
    assert len(chosen.evaluation) == len(chosen.targets) == 200
    assert not set(chosen.evaluation) & set(chosen.calibration)
    assert choose_images(None, 1000).targets is None


def test_a_image_that_is_cut_short_is_named(repository: Path, tmp_path: Path) -> None:
    for number in range(5):
        image = Image.open(repository / "docs" / "digits" / "seven.png").convert("RGB")
        image.save(tmp_path / f"{number}.jpg")
    (tmp_path / "3.jpg").write_bytes((tmp_path / "3.jpg").read_bytes()[:-200])
    with pytest.raises(InvalidInput, match=r"3\.jpg cannot be decoded"):
        choose_images(tmp_path, 10)
