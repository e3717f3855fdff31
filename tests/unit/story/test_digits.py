"""Handwritten digits as JPEGs: the same split every time."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest

from graphkiln.story.digits import Digits, digit_image, split_digits


@pytest.fixture(scope="module")
def split() -> tuple[Digits, Digits]:
    return split_digits()


def test_the_split_never_changes(split: tuple[Digits, Digits]) -> None:
    """Weights that were trained on one part must not be judged on it later."""
    digest = hashlib.sha256(np.concatenate([part.targets for part in split]).tobytes()).hexdigest()[:16]
    assert digest == "15a1a392c214df31"


def test_an_image_has_the_full_range_of_grays() -> None:
    image = digit_image(np.array([[0.0, 16.0], [8.0, 16.0]]), 2)
    assert np.asarray(image).tolist() == [[0, 255], [128, 255]]
    assert digit_image(np.zeros((8, 8)), 64).size == (64, 64)
