"""Labelled images: scikit-learn's handwritten digits as JPEGs."""

from __future__ import annotations

import io
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from PIL import Image

CLASSES = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
_IMAGE_SIDE = 256
_QUALITY = 90
_SEED = 20260101
_HELD_OUT = 0.25


@dataclass(frozen=True, kw_only=True, slots=True)
class Digits:
    """Labelled images in random order.

    Attributes:
        images: 8x8 pixels of 0..16, `[images, 8, 8]`.
        targets: Class of each image as an index into `CLASSES`, int64 `[images]`.
    """

    images: npt.NDArray[np.float64]
    targets: npt.NDArray[np.int64]

    @property
    def jpegs(self) -> tuple[bytes, ...]:
        """RGB images of 256x256 pixels."""
        return tuple(map(_encode_jpeg, self.images))

    def first(self, count: int) -> Digits:
        """Return the first `count` images."""
        return Digits(images=self.images[:count], targets=self.targets[:count])


def split_digits() -> tuple[Digits, Digits]:
    """Split the digits into 1,347 for training and calibration, and 450 held out. The split is always the same."""
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    digits = load_digits()
    rows = np.arange(len(digits.images))
    parts = train_test_split(rows, test_size=_HELD_OUT, random_state=_SEED, stratify=digits.target)
    training, held_out = (
        Digits(images=digits.images[part], targets=digits.target[part].astype(np.int64)) for part in parts
    )
    return training, held_out


def digit_image(digit: npt.NDArray[np.float64], side: int) -> Image.Image:
    """Convert an 8x8 array of 0..16 to a gray image of `side` x `side` pixels."""
    small = Image.fromarray((digit * (255 / 16)).round().astype(np.uint8))
    return small.resize((side, side), Image.Resampling.BICUBIC)


def _encode_jpeg(digit: npt.NDArray[np.float64]) -> bytes:
    file = io.BytesIO()
    digit_image(digit, _IMAGE_SIDE).convert("RGB").save(file, "JPEG", quality=_QUALITY)
    return file.getvalue()
