"""The images of a story: the user's own, or held-out digits."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from graphkiln.story.runner import EVALUATION_COUNT, ImageSet, choose_images
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


class TestChoice:
    @pytest.fixture
    def folder(self, tmp_path: Path) -> Path:
        """500 small JPEGs, one in another spelling, and files that are none."""
        file = io.BytesIO()
        Image.new("L", (1, 1)).save(file, "JPEG")
        for number in range(499):
            (tmp_path / f"{number:03}.jpg").write_bytes(file.getvalue() + bytes([number % 256, number // 256]))
        (tmp_path / "999.JPEG").write_bytes(file.getvalue())
        (tmp_path / "notes.txt").write_text("no image")
        (tmp_path / "other.png").write_bytes(b"no JPEG")
        return tmp_path

    def test_takes_no_more_than_it_needs(self, folder: Path) -> None:
        chosen = choose_images(folder, 1000)
        assert (len(chosen.evaluation), len(chosen.calibration)) == (EVALUATION_COUNT, 64)
        assert chosen.description == f"200 images of {folder}"
        assert chosen.labels == ()

    def test_a_folder_that_is_missing_or_a_file(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("")
        for path in (tmp_path / "none", tmp_path / "file"):
            with pytest.raises(InvalidInput, match="holds 0 JPEGs"):
                choose_images(path, 10)


class TestWrite:
    def image_set(self, count: int, *, labeled: bool) -> ImageSet:
        return ImageSet(
            description="",
            evaluation=tuple(f"e{number}".encode() for number in range(count)),
            targets=np.arange(count) % 2 if labeled else None,
            calibration=(b"c0", b"c1"),
            labels=("zero", "one") if labeled else (),
        )

    def test_labeled_samples_stand_in_folders_of_their_classes(self, tmp_path: Path) -> None:
        folder = tmp_path / "deep" / "story"
        self.image_set(3, labeled=True).write(folder / "samples", folder / "calibration", folder / "labels.txt")
        files = {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*.jpg")}
        assert files == {
            "samples/zero/000.jpg": b"e0", "samples/one/001.jpg": b"e1", "samples/zero/002.jpg": b"e2",
            "calibration/000.jpg": b"c0", "calibration/001.jpg": b"c1",
        }  # fmt: skip
        assert (folder / "labels.txt").read_text() == "zero\none\n"

    def test_without_classes_there_are_no_labels(self, tmp_path: Path) -> None:
        self.image_set(2, labeled=False).write(tmp_path / "s", tmp_path / "c", tmp_path / "labels.txt")
        assert sorted(path.name for path in (tmp_path / "s" / "unknown").iterdir()) == ["000.jpg", "001.jpg"]
        assert not (tmp_path / "labels.txt").exists()

    def test_conversions_are_proven_on_some_of_them(self, tmp_path: Path) -> None:
        self.image_set(200, labeled=True).write(tmp_path / "s", tmp_path / "c", tmp_path / "labels.txt")
        assert len(list((tmp_path / "s").rglob("*.jpg"))) == 64

    def test_again_is_the_same(self, tmp_path: Path) -> None:
        """A story that goes on writes them once more."""
        for _ in range(2):
            self.image_set(3, labeled=True).write(tmp_path / "s", tmp_path / "c", tmp_path / "labels.txt")
        assert len(list(tmp_path.rglob("*.jpg"))) == 5
