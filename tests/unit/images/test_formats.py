"""Which files are images."""

from __future__ import annotations

from pathlib import Path

import pytest
from PIL import Image

from graphkiln_backend.images.formats import SUFFIXES, image_files


def fill(folder: Path, *names: str) -> Path:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()
    return folder


def test_files_at_any_depth_sorted_by_path(tmp_path: Path) -> None:
    folder = fill(tmp_path, "b/2.png", "a/z/1.jpg", "c.webp", "a/0.bmp")
    assert image_files(folder) == [folder / name for name in ("a/0.bmp", "a/z/1.jpg", "b/2.png", "c.webp")]


@pytest.mark.parametrize("name", ["a.PNG", "a.JpEg", "a.tar.gif", "a b.TIF"])
def test_endings_in_any_case(tmp_path: Path, name: str) -> None:
    assert image_files(fill(tmp_path, name)) == [tmp_path / name]


@pytest.mark.parametrize("name", ["png", ".png", "a.png.txt", "a.pngx", "labels.txt", "a", "__MACOSX/._a.png"])
def test_what_is_none(tmp_path: Path, name: str) -> None:
    assert image_files(fill(tmp_path, name)) == []


def test_other_endings_can_be_asked_for(tmp_path: Path) -> None:
    folder = fill(tmp_path, "a.png", "b.raw")
    assert image_files(folder, frozenset({".raw"})) == [folder / "b.raw"]


def test_a_folder_with_such_a_name_is_none(tmp_path: Path) -> None:
    folder = fill(tmp_path, "scans.png/1.png")
    assert image_files(folder) == [folder / "scans.png" / "1.png"]


def test_an_empty_folder_and_none(tmp_path: Path) -> None:
    assert image_files(tmp_path) == []
    assert image_files(tmp_path / "nowhere") == []


def test_every_ending_is_one_that_is_decoded() -> None:
    known = Image.registered_extensions()
    assert {suffix for suffix in SUFFIXES if known.get(suffix) not in Image.OPEN} == set()
