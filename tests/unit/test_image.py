"""Decoding, geometry and normalisation of pictures, against Pillow and torchvision."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from graphkiln.client.image import load_sample
from graphkiln.graph.dtypes import DType
from graphkiln.graph.errors import InvalidInput
from graphkiln.graph.preprocess import Preprocess

RAW = Preprocess(dtype=DType.UINT8, layout="HWC")


def encoded(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


class TestImage:
    def test_resizes_and_crops_as_pillow_does(self) -> None:
        image = Image.effect_noise((90, 60), 80).convert("RGB")
        sample = load_sample(image, Preprocess(resize=30, crop=(24, 24), dtype=DType.UINT8, layout="HWC"))
        expected = image.resize((45, 30), Image.Resampling.BILINEAR).crop((10, 3, 34, 27))
        np.testing.assert_array_equal(sample, np.asarray(expected))

    @pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGB", "RGBA", "CMYK", "YCbCr", "I;16", "I", "F"])
    @pytest.mark.parametrize("color", ["RGB", "L"])
    def test_takes_every_mode(self, mode: str, color: Any) -> None:
        image = Image.new(mode, (4, 5))
        sample = load_sample(image, Preprocess(color=color, dtype=DType.UINT8, layout="HWC"))
        assert sample.shape == (5, 4, 1 if color == "L" else 3)

    def test_sixteen_bits_are_scaled_not_clipped(self) -> None:
        image = Image.fromarray(np.array([[0, 257, 32896, 65535]], np.uint16))
        np.testing.assert_array_equal(load_sample(image, RAW)[0, :, 0], [0, 1, 128, 255])

    def test_exif_turns_the_picture_upright(self) -> None:
        image = Image.new("RGB", (2, 1))
        image.putpixel((0, 0), (255, 0, 0))
        exif = Image.Exif()
        exif[0x0112] = 6  # the camera was turned: rotate clockwise to see it upright
        sample = load_sample(encoded(image, exif=exif), RAW)
        np.testing.assert_array_equal(sample[:, 0, 0], [255, 0])

    def test_bgr_is_rgb_backwards(self) -> None:
        image = Image.new("RGB", (1, 1), (1, 2, 3))
        sample = load_sample(image, Preprocess(color="BGR", dtype=DType.UINT8, layout="HWC"))
        np.testing.assert_array_equal(sample.ravel(), [3, 2, 1])

    @pytest.mark.parametrize(
        ("picture", "words"),
        [
            (b"", "not an image"),
            (b"GIF89a but not really", "cannot be decoded|not an image"),
            (encoded(Image.effect_noise((50, 50), 80))[:300], "cannot be decoded"),
            ("nowhere.jpg", r"no file nowhere\.jpg"),
            (Path(__file__).parent, "cannot be decoded"),
            (np.zeros((3, 4, 5), np.uint8), "expected uint8 pixels"),
            (np.zeros((3, 4, 3), np.float32), "expected uint8 pixels"),
            (np.zeros((0, 4, 3), np.uint8), "expected uint8 pixels"),
        ],
    )
    def test_what_is_no_picture(self, picture: Any, words: str) -> None:
        with pytest.raises(InvalidInput, match=words):
            load_sample(picture, RAW)

    def test_a_decompression_bomb_is_refused(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
        with pytest.raises(InvalidInput, match="too large"):
            load_sample(encoded(Image.new("L", (300, 300))), RAW)
