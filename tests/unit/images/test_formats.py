"""Which files are images."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from graphkiln_backend.graph.errors import InvalidInput
from graphkiln_backend.images.formats import SUFFIXES, image_files, list_images


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


def test_a_folder_that_may_not_be_looked_into_is_not_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two folders the images of one were taken for all."""
    closed, scandir = fill(tmp_path, "a/1.png", "b/2.png") / "b", os.scandir

    def guarded(place: str) -> Any:
        if Path(place) == closed:
            raise PermissionError(errno.EACCES, "Permission denied", place)
        return scandir(place)

    monkeypatch.setattr(os, "scandir", guarded)
    with pytest.raises(InvalidInput, match=f"the images in {closed} cannot be listed: Permission denied"):
        image_files(tmp_path)


def test_a_link_that_leads_nowhere_is_listed_and_so_told_of_by_who_opens_it(tmp_path: Path) -> None:
    (tmp_path / "1.png").symlink_to(tmp_path / "gone.png")
    assert image_files(tmp_path) == [tmp_path / "1.png"]


def test_images_of_other_formats_are_told_of(tmp_path: Path) -> None:
    folder = fill(tmp_path, "a/1.png", "b.txt")
    assert list_images(folder) == ([folder / "a" / "1.png"], "")
    files, said = list_images(fill(tmp_path, "z.HEIC", "c.avif"))
    assert files == [folder / "a" / "1.png"]
    assert said.startswith(f"{folder}: left out 2 files, such as {folder / 'c.avif'}, of other formats (known endings")


@pytest.mark.parametrize(("name", "said"), [("a.txt", "holds no image"), ("a.HEIC", "holds 1 file, such as .*a.HEIC,")])
def test_a_folder_without_images_is_refused(tmp_path: Path, name: str, said: str) -> None:
    with pytest.raises(InvalidInput, match=said):
        list_images(fill(tmp_path, name))


def test_linked_folders_are_followed_unless_they_lead_back(tmp_path: Path) -> None:
    """As `score` does: with a link to the photos of a year, `embed` knew none of them."""
    fill(tmp_path, "other/2.png", "photos/1.png")
    photos, other = tmp_path / "photos", tmp_path / "other"
    (photos / "year").symlink_to(other)
    for place, target in ((photos / "self", photos), (other / "back", photos), (photos / "loop", photos / "loop")):
        place.symlink_to(target)
    assert image_files(photos) == [photos / "1.png", photos / "year" / "2.png"]


def test_hidden_names_are_left_out(tmp_path: Path) -> None:
    folder = fill(tmp_path / ".mine", "1.png", ".2.png", ".thumbnails/1.png")
    assert image_files(folder) == [folder / "1.png"]
