"""What is said of files that are no images."""

from __future__ import annotations

import base64
import errno
import io
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from graphkiln_backend.graph.errors import InvalidInput
from graphkiln_backend.graph.files import UnusableFile
from graphkiln_backend.graph.preprocess import Preprocess
from graphkiln_backend.images.decoding import (
    check_pixels,
    describe,
    open_image,
    prepare,
    refuse_format,
    refuse_path,
    upright_size,
)


def avif() -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (8, 8)).save(file, "AVIF")
    return file.getvalue()


def test_a_format_is_named_with_a_way_out() -> None:
    error = refuse_format("cat.jpg", avif())
    assert error.message == "cat.jpg is not an image in a known format: it is AVIF"
    assert error.hint == "convert it: avifdec FILE OUT.png; known are JPEG, PNG, WEBP, BMP, GIF, TIFF"


def test_what_nobody_knows_is_not_guessed() -> None:
    error = refuse_format("5 bytes", b"hello")
    assert str(error) == "5 bytes is not an image in a known format (known are JPEG, PNG, WEBP, BMP, GIF, TIFF)"


def test_a_file_that_cannot_be_read() -> None:
    missing = FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), "a.png")
    assert refuse_path("a.png", missing).message == "there is no file a.png"
    assert refuse_path("a.png", UnusableFile("it is a pipe")).message == "a.png cannot be decoded: it is a pipe"
    assert refuse_path("a.png", OSError()).message == "a.png cannot be decoded: OSError"


@pytest.mark.parametrize("length", [60, 3000, 100_000])
@pytest.mark.parametrize("begin", ["", "data:image/png;base64,"])
def test_an_image_given_as_text(length: int, begin: str) -> None:
    """The whole text stood in the message, a megabyte of it."""
    text = begin + base64.b64encode(b"\x89PNG\r\n\x1a\n" + bytes(length)).decode()
    with pytest.raises(InvalidInput, match=r"is no path: it is (base64 text|a data: URL) \(decode ") as caught:
        open_image(text)
    assert len(str(caught.value)) < 4500


def test_a_name_that_is_too_long() -> None:
    with pytest.raises(InvalidInput, match=r"^there is no file aaaa.*a\.\.\. \(5004 characters\)$"):
        open_image("a" * 5000 + ".png")


def test_a_file_that_is_named_as_base64_begins_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Image.new("RGB", (5, 4)).save("R0lGOD.png")
    assert open_image("R0lGOD.png").size == (5, 4)


def test_every_way_in_says_the_same(tmp_path: Path) -> None:
    (tmp_path / "cat.jpg").write_bytes(avif())
    for read in (lambda: open_image(tmp_path / "cat.jpg"), lambda: open_image(avif()), lambda: upright_size(avif())):
        with pytest.raises(InvalidInput, match=r"it is AVIF \(convert it: avifdec"):
            read()


@pytest.mark.parametrize("given", [io.BytesIO(avif()), bytearray(b"a"), memoryview(b"a"), [b"a", b"b"], None, 3.5])
def test_what_is_given_in_the_place_of_an_image(given: Any) -> None:
    """An open file ended in an AttributeError."""
    for read in (open_image, lambda image: prepare(image, Preprocess())):
        with pytest.raises(InvalidInput, match=rf"^a {type(given).__name__} is no image \(give a path, the bytes of"):
            read(given)
    assert describe(given) == type(given).__name__ or hasattr(given, "shape")


@pytest.mark.parametrize(
    ("shape", "dtype"), [((3, 4, 5), "uint8"), ((3, 4, 3), "float32"), ((0, 4, 3), "uint8"), ((2, 3, 4, 3), "uint8")]
)
def test_an_array_that_holds_no_pixels(shape: Any, dtype: str) -> None:
    with pytest.raises(InvalidInput, match=r"expected uint8 pixels \[height, width, 3\], got .* \(ndarray\)"):
        check_pixels(np.zeros(shape, dtype), "ndarray")
