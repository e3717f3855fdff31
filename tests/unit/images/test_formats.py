"""Image files of folders, and names of unsupported formats."""

from __future__ import annotations

import base64
import errno
import gzip
import io
import json
import os
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from graphkiln_backend.graph.errors import InvalidInput
from graphkiln_backend.images.formats import FORMATS, SUFFIXES, image_files, list_images, recognize, recognize_text


def fill(folder: Path, *names: str) -> Path:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()
    return folder


@pytest.mark.parametrize("name", ["a.PNG", "a.JpEg", "a.tar.gif", "a b.TIF"])
def test_suffixes_in_any_case(tmp_path: Path, name: str) -> None:
    assert image_files(fill(tmp_path, name)) == [tmp_path / name]


@pytest.mark.parametrize("name", ["png", ".png", "a.png.txt", "a.pngx", "labels.txt", "a", "__MACOSX/._a.png"])
def test_files_that_are_not_images(tmp_path: Path, name: str) -> None:
    assert image_files(fill(tmp_path, name)) == []


def test_all_suffixes_can_be_decoded() -> None:
    known = Image.registered_extensions()
    assert {suffix for suffix in SUFFIXES if known.get(suffix) not in Image.OPEN} == set()


def test_unreadable_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The images of one of two folders were taken for all."""
    closed, scandir = fill(tmp_path, "a/1.png", "b/2.png") / "b", os.scandir

    def guarded(place: str) -> Any:
        if Path(place) == closed:
            raise PermissionError(errno.EACCES, "Permission denied", place)
        return scandir(place)

    monkeypatch.setattr(os, "scandir", guarded)
    with pytest.raises(InvalidInput, match=f"the images in {closed} cannot be listed: Permission denied"):
        image_files(tmp_path)


def test_dangling_link_is_listed(tmp_path: Path) -> None:
    (tmp_path / "1.png").symlink_to(tmp_path / "gone.png")
    assert image_files(tmp_path) == [tmp_path / "1.png"]


def test_other_formats_are_reported(tmp_path: Path) -> None:
    folder = fill(tmp_path, "a/1.png", "b.txt")
    assert list_images(folder) == ([folder / "a" / "1.png"], "")
    files, said = list_images(fill(tmp_path, "z.HEIC", "c.avif"))
    assert files == [folder / "a" / "1.png"]
    assert said.startswith(f"{folder}: left out 2 files, such as {folder / 'c.avif'}, of other formats (known endings")


@pytest.mark.parametrize(("name", "said"), [("a.txt", "holds no image"), ("a.HEIC", "holds 1 file, such as .*a.HEIC,")])
def test_folder_without_images(tmp_path: Path, name: str, said: str) -> None:
    with pytest.raises(InvalidInput, match=said):
        list_images(fill(tmp_path, name))


def test_linked_folders_are_followed(tmp_path: Path) -> None:
    """As `score` does: with a link to the photos of a year, `embed` knew none of them."""
    fill(tmp_path, "other/2.png", "photos/1.png")
    photos, other = tmp_path / "photos", tmp_path / "other"
    (photos / "year").symlink_to(other)
    for place, target in ((photos / "self", photos), (other / "back", photos), (photos / "loop", photos / "loop")):
        place.symlink_to(target)
    assert image_files(photos) == [photos / "1.png", photos / "year" / "2.png"]


# What files are that are no images of a known format.

PIXELS = Image.effect_noise((8, 6), 80).convert("RGB")


def written(kind: str, **options: Any) -> bytes:
    file = io.BytesIO()
    PIXELS.save(file, kind, **options)
    return file.getvalue()


def numpy_file() -> bytes:
    file = io.BytesIO()
    np.save(file, np.zeros((2, 2), np.uint8))
    return file.getvalue()


def archive() -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as opened:
        opened.writestr("a.png", b"")
    return file.getvalue()


def name_of(head: bytes) -> str:
    found = recognize(head)
    return found.name if found else ""


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("AVIF", "AVIF"),
        ("JPEG2000", "JPEG 2000"),
        ("PDF", "PDF"),
        ("EPS", "PostScript, a program that draws"),
        ("PPM", "Netpbm"),
        ("ICO", "an icon"),
        ("DDS", "a texture"),
    ],
)
def test_formats_written_by_pillow(kind: str, name: str) -> None:
    assert name_of(written(kind)) == name


def box(brand: bytes, *compatible: bytes) -> bytes:
    content = brand + bytes(4) + b"".join(compatible)
    return (8 + len(content)).to_bytes(4, "big") + b"ftyp" + content


@pytest.mark.parametrize(
    ("head", "name"),
    [
        (box(b"heic", b"mif1", b"heic"), "HEIC"),
        (box(b"mif1", b"mif1", b"heic"), "HEIC"),
        (box(b"mif1", b"mif1", b"avif"), "AVIF"),
        (box(b"avis", b"avif"), "AVIF"),
        (box(b"crx ", b"isom"), "a camera's raw data"),
        (box(b"isom", b"mp41"), "a video"),
        (box(b"qt  "), "a video"),
        (b"\x1aE\xdf\xa3\x9fB\x86\x81", "a video"),
        (b"\0\0\0\x0cJXL \r\n\x87\n", "JPEG XL"),
        (b"\xff\x0a\x7f", "JPEG XL"),
        (b"8BPS\0\1", "a Photoshop file"),
        (b"\0\5\x16\7\0\2\0\0Mac OS X", "what macOS keeps of an image beside it"),
        (b"", "empty"),
    ],
)
def test_other_formats(head: bytes, name: str) -> None:
    assert name_of(head) == name


@pytest.mark.parametrize(
    ("content", "name"),
    [
        (b'<svg xmlns="http://www.w3.org/2000/svg"/>', "SVG, a drawing without pixels"),
        (b'\xef\xbb\xbf<?xml version="1.0"?>\n<!-- me --><SVG/>', "SVG, a drawing without pixels"),
        (b"\n<!DOCTYPE html><title>404</title>", "a web page"),
        (json.dumps({"error": "not found"}).encode(), "JSON"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 7\n", "a pointer of Git LFS"),
        (numpy_file(), "an array of numpy"),
        (archive(), "a ZIP archive"),
        (gzip.compress(written("PNG")), "compressed by gzip"),
        (b"data:image/png;base64," + base64.b64encode(written("PNG")), "a data: URL"),
    ],
)
def test_text_and_archives(content: bytes, name: str) -> None:
    found = recognize(content)
    assert found
    assert found.name == name
    assert found.hint


@pytest.mark.parametrize("kind", [kind for kind in FORMATS if kind != "BMP"])  # of which two letters say too little
def test_base64(kind: str) -> None:
    found = recognize_text(base64.b64encode(written(kind)))
    assert found
    assert found.name == "base64 text"


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "GIF", "WEBP"])
def test_damaged_header(kind: str) -> None:
    assert name_of(written(kind)[:16]).upper() == f"DAMAGED: IT BEGINS AS A {kind}"


@pytest.mark.parametrize("head", [b"hello", b"\0" * 64, b"P", b"PK", b"<", b"{}", b"ftyp", b"\xff", b"/9"])
def test_unknown_formats(head: bytes) -> None:
    assert recognize(head) is None
