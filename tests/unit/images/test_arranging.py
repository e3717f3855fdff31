"""From a decoded image to a sample, beside Pillow's own functions."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from PIL import Image

from graphkiln_backend.graph.dtypes import DType
from graphkiln_backend.graph.errors import InvalidInput
from graphkiln_backend.graph.preprocess import Letterbox, Preprocess
from graphkiln_backend.images.decoding import arrange

IMAGE = Image.effect_noise((40, 30), 80).convert("RGB")


def pixels(**fields: Any) -> Preprocess:
    return Preprocess(dtype=DType.UINT8, layout="HWC", **fields)


@pytest.mark.parametrize("interpolation", ["nearest", "box", "bilinear", "hamming", "bicubic", "lanczos"])
def test_resizes_then_crops(interpolation: Any) -> None:
    sample = arrange(IMAGE, pixels(resize=15, crop=(9, 10), interpolation=interpolation), "a")
    expected = IMAGE.resize((20, 15), Image.Resampling[interpolation.upper()]).crop((5, 3, 15, 12))
    np.testing.assert_array_equal(sample, np.asarray(expected))


def test_what_has_its_size_is_not_touched() -> None:
    np.testing.assert_array_equal(arrange(IMAGE, pixels(), "a"), np.asarray(IMAGE))


def test_blue_comes_first_where_the_spec_says_so() -> None:
    np.testing.assert_array_equal(arrange(IMAGE, pixels(color="BGR"), "a"), np.asarray(IMAGE)[..., ::-1])


def test_a_letterbox_is_filled_with_gray_or_with_zeros() -> None:
    white = Image.new("RGB", (40, 30), "white")
    gray = arrange(white, pixels(letterbox=Letterbox(size=(40, 40), padding=7)), "a")
    assert (gray[:5] == 7).all() & (gray[5:35] == 255).all() & (gray[35:] == 7).all()
    zeros = arrange(white, Preprocess(letterbox=Letterbox(size=(40, 40), padding=None), mean=(0.5,) * 3), "a")
    assert (zeros[:, :5] == 0).all() & (zeros[:, 5:35] == 0.5).all()


def test_a_line_that_would_become_a_wall_is_named() -> None:
    with pytest.raises(InvalidInput, match=r"^a\.png is too long and narrow: it would be resized to 25600000x256$"):
        arrange(Image.new("L", (100_000, 1)), Preprocess(resize=256, color="L"), "a.png")
