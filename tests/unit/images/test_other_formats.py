"""What files are that are no images of a known format."""

from __future__ import annotations

import base64
import gzip
import io
import json
import zipfile
from typing import Any

import numpy as np
import pytest
from PIL import Image

from graphkiln_backend.images.formats import FORMATS
from graphkiln_backend.images.other_formats import recognize, recognize_text

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
def test_what_pillow_writes(kind: str, name: str) -> None:
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
def test_what_pillow_does_not_write(head: bytes, name: str) -> None:
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
def test_what_lies_where_an_image_was_expected(content: bytes, name: str) -> None:
    found = recognize(content)
    assert found
    assert found.name == name
    assert found.way_out


@pytest.mark.parametrize("kind", [kind for kind in FORMATS if kind != "BMP"])  # of which two letters say too little
def test_images_in_base64_are_text(kind: str) -> None:
    found = recognize_text(base64.b64encode(written(kind)))
    assert found
    assert found.name == "base64 text"


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "GIF", "WEBP"])
def test_an_image_whose_header_is_damaged(kind: str) -> None:
    assert name_of(written(kind)[:16]).upper() == f"DAMAGED: IT BEGINS AS A {kind}"


@pytest.mark.parametrize("head", [b"hello", b"\0" * 64, b"P", b"PK", b"<", b"{}", b"ftyp", b"\xff", b"/9"])
def test_what_nobody_knows(head: bytes) -> None:
    assert recognize(head) is None
