"""Images of any mode in colors or gray of 8 bits."""

from __future__ import annotations

import tracemalloc
from typing import Any

import numpy as np
import pytest
from PIL import Image

from graphkiln_backend.images import colors as module
from graphkiln_backend.images.colors import to_color


@pytest.mark.parametrize("color", ["RGB", "BGR", "L"])
def test_every_value_of_sixteen_bits_is_rounded_to_the_nearest_of_eight(color: str) -> None:
    """By whole numbers: half of 257 is none, so that nothing lies between two."""
    values = np.arange(1 << 16, dtype=np.uint16).reshape(256, 256)
    found = np.asarray(to_color(Image.fromarray(values), color))
    expected = (values.astype(np.int64) + 128) // 257
    np.testing.assert_array_equal(found if color == "L" else found[..., 1], expected)


def test_strips_join_without_a_seam(monkeypatch: pytest.MonkeyPatch) -> None:
    pixels = np.random.default_rng(0).integers(0, 1 << 16, (37, 11), np.uint16)
    whole = np.asarray(to_color(Image.fromarray(pixels), "L"))
    for strip in (1, 12, 33, 37 * 11):
        monkeypatch.setattr(module, "_STRIP_PIXELS", strip)
        np.testing.assert_array_equal(np.asarray(to_color(Image.fromarray(pixels), "L")), whole)


def test_sixteen_bits_take_little_memory_on_their_way_to_eight(monkeypatch: pytest.MonkeyPatch) -> None:
    """They took 24 bytes a pixel: 4 GB of a file of half a megabyte."""
    monkeypatch.setattr(module, "_STRIP_PIXELS", 1 << 13)
    image = Image.fromarray(np.zeros((1000, 1000), np.uint16))
    tracemalloc.start()
    try:
        to_color(image, "L")
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 8e6


@pytest.mark.parametrize("color", ["RGB", "L"])
@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGB", "RGBA", "CMYK", "YCbCr", "I;16", "I"])
def test_there_is_one_mode_in_the_end(mode: str, color: Any) -> None:
    image = to_color(Image.new(mode, (4, 5)), color)
    assert (image.mode, image.size) == (color, (4, 5))


def test_an_image_that_is_as_it_should_be_is_itself() -> None:
    image = Image.new("RGB", (2, 2))
    assert to_color(image, "BGR") is image
