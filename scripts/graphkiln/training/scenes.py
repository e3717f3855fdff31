"""Images whose objects are known exactly: scikit-learn's handwritten digits, composed into scenes.

The strokes are real, and so is what makes scenes hard: sizes differ, backgrounds are uneven and noisy, some digits are
fainter than others. Digits of the held-out scenes are seen by no training scene.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from graphkiln.story.digits import digit_image

SIDE = 96
"""Height and width of a scene in pixels."""
OBJECTS = (1, 5)
"""Fewest and most digits of a scene that are tried; one that finds no room is left out."""
_DIGIT_SIDES = (22, 44)
_STROKE = 0.5
"""A pixel belongs to a digit where this share of the digit's brightest ink lies on it."""
_BACKGROUND = (10.0, 70.0)
_INK = (110.0, 180.0)
_NOISE = 3.0
_ATTEMPTS = 20
_HELD_OUT = 4
"""One digit in this many is held out."""

Digits = npt.NDArray[np.float64]
Generator = np.random.Generator


@dataclass(frozen=True, kw_only=True, slots=True)
class Scene:
    """An image and what is on it.

    Attributes:
        pixels: Gray levels, uint8 `[height, width]`.
        boxes: Around the strokes of each digit, as x1, y1, x2, y2 in pixels, float32 `[digits, 4]`.
        classes: Value of each digit, int64 `[digits]`.
        segmentation: Of each pixel: 0 for the background, else 1 + the value of its digit, uint8 `[height, width]`.
    """

    pixels: npt.NDArray[np.uint8]
    boxes: npt.NDArray[np.float32]
    classes: npt.NDArray[np.int64]
    segmentation: npt.NDArray[np.uint8]


def compose_scenes(count: int, *, seed: int, held_out: bool = False) -> list[Scene]:
    """Scenes from a fixed seed.

    Args:
        count: How many.
        seed: Of all that is random in them.
        held_out: Whether they are made of the digits that are held out, or of all others.
    """
    images, values = _digits(held_out)
    generator = np.random.default_rng(seed)
    return [compose(images, values, generator) for _ in range(count)]


def compose(digits: Digits, values: Sequence[int] | npt.NDArray[np.int64], generator: Generator) -> Scene:
    """One scene.

    Args:
        digits: Images of 0..16, `[digits, 8, 8]`.
        values: What each shows, 0..9.
        generator: Source of randomness.
    """
    canvas = _background(generator)
    segmentation = np.zeros((SIDE, SIDE), np.uint8)
    boxes: list[tuple[int, int, int, int]] = []
    classes: list[int] = []
    for _ in range(generator.integers(OBJECTS[0], OBJECTS[1] + 1)):
        row = int(generator.integers(len(digits)))
        ink = _draw_digit(digits[row], generator)
        place = _free_place(ink.shape, boxes, generator)
        if place is None:
            continue
        top, left = place
        height, width = ink.shape
        canvas[top : top + height, left : left + width] += ink * generator.uniform(*_INK)
        stroke = ink > _STROKE
        segmentation[top : top + height, left : left + width][stroke] = values[row] + 1
        boxes.append(_bounds(stroke, top, left))
        classes.append(int(values[row]))
    noisy = canvas + generator.normal(0, _NOISE, canvas.shape)
    return Scene(
        pixels=noisy.round().clip(0, 255).astype(np.uint8),
        boxes=np.array(boxes, np.float32).reshape(-1, 4),
        classes=np.array(classes, np.int64),
        segmentation=segmentation,
    )


def digit_rows(held_out: bool) -> tuple[Digits, npt.NDArray[np.int64]]:
    """The digits that scenes are made of: images of 0..16, `[digits, 8, 8]`, and their values."""
    return _digits(held_out)


def _digits(held_out: bool) -> tuple[Digits, npt.NDArray[np.int64]]:
    from sklearn.datasets import load_digits

    digits = load_digits()
    chosen = (np.arange(len(digits.images)) % _HELD_OUT == 0) == held_out
    return digits.images[chosen], digits.target[chosen].astype(np.int64)


def _background(generator: Generator) -> npt.NDArray[np.float64]:
    """A brightness that changes evenly from one side to the other, `[height, width]`."""
    level, slope = generator.uniform(*_BACKGROUND), generator.uniform(-25, 25, 2)
    rows, columns = np.mgrid[0:SIDE, 0:SIDE] / SIDE - 0.5
    return np.asarray(level + slope[0] * rows + slope[1] * columns)


def _draw_digit(digit: npt.NDArray[np.float64], generator: Generator) -> npt.NDArray[np.float64]:
    """Ink of 0..1 in a random size and a random proportion, `[height, width]`."""
    side = int(generator.integers(_DIGIT_SIDES[0], _DIGIT_SIDES[1] + 1))
    width = max(8, round(side * generator.uniform(0.8, 1.1)))
    ink = np.asarray(digit_image(digit, side).resize((width, side)), np.float64)
    return np.asarray(ink / ink.max())


def _free_place(
    shape: tuple[int, ...], boxes: Sequence[tuple[int, int, int, int]], generator: Generator
) -> tuple[int, int] | None:
    """Top and left of a place that touches no box; None where chance finds none."""
    height, width = shape
    for _ in range(_ATTEMPTS):
        top, left = (int(generator.integers(0, SIDE - length + 1)) for length in (height, width))
        if all(left >= x2 or left + width <= x1 or top >= y2 or top + height <= y1 for x1, y1, x2, y2 in boxes):
            return top, left
    return None


def _bounds(stroke: npt.NDArray[np.bool_], top: int, left: int) -> tuple[int, int, int, int]:
    """The box around the pixels of a stroke, as x1, y1, x2, y2."""
    rows, columns = np.flatnonzero(stroke.any(axis=1)), np.flatnonzero(stroke.any(axis=0))
    return left + int(columns[0]), top + int(rows[0]), left + int(columns[-1]) + 1, top + int(rows[-1]) + 1
