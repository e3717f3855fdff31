"""Scenes hold what they say: boxes around strokes, classes of pixels, no digit of the other half."""

from __future__ import annotations

import numpy as np

from graphkiln.training.scenes import SIDE, compose_scenes, digit_rows


def test_boxes_are_the_bounds_of_the_strokes() -> None:
    scenes = compose_scenes(20, seed=1)
    for scene in scenes:
        assert scene.pixels.shape == scene.segmentation.shape == (SIDE, SIDE)
        assert len(scene.boxes) == len(scene.classes) > 0
        for (x1, y1, x2, y2), value in zip(scene.boxes.astype(int), scene.classes, strict=True):
            stroke = scene.segmentation[y1:y2, x1:x2] == value + 1
            assert stroke[0].any()
            assert stroke[-1].any()
            assert stroke[:, 0].any()
            assert stroke[:, -1].any()


def test_a_seed_repeats_and_another_does_not() -> None:
    first, again, other = (compose_scenes(1, seed=seed)[0] for seed in (1, 1, 2))
    assert np.array_equal(first.pixels, again.pixels)
    assert not np.array_equal(first.pixels, other.pixels)


def test_held_out_digits_are_in_no_training_scene() -> None:
    (training, _), (held_out, _) = digit_rows(held_out=False), digit_rows(held_out=True)
    assert (len(training), len(held_out)) == (1347, 450)
