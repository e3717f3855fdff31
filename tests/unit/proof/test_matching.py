"""Which detection is which: overlap, class, score, corners, masks, keypoints."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from pycocotools import mask as coco

from graphkiln_backend.proof.detections import (
    Found,
    match,
    pairwise_iou,
    points_tolerance,
    tied_points,
)
from graphkiln_backend.proof.policy import BF16_TASKS, FP16_TASKS, FP32_TASKS, INT8_TASKS, TaskLimits

GENERATOR = np.random.default_rng(5)
CORNERS = np.sort(GENERATOR.uniform(0, 100, (6, 2, 2)), axis=1).reshape(6, 4)
FOUND = Found(boxes=CORNERS, scores=np.linspace(0.9, 0.4, 6), classes=np.arange(6))


def test_overlaps_are_those_of_pycocotools() -> None:
    others = np.sort(GENERATOR.uniform(0, 100, (9, 2, 2)), axis=1).reshape(9, 4)
    sizes = [np.hstack([boxes[:, :2], boxes[:, 2:] - boxes[:, :2]]) for boxes in (CORNERS, others)]
    expected = coco.iou(*sizes, [False] * 9)
    np.testing.assert_allclose(pairwise_iou(CORNERS, others), expected, atol=1e-12)


LINES = Found(
    boxes=np.array([[121.9, 0, 179.4, 0], [0, 65.1, 0, 167.8]]), scores=np.array([0.9, 0.8]), classes=np.array([1, 1])
)
"""Boxes that were cut off at the border of the image."""


@pytest.mark.parametrize("limits", [FP32_TASKS, FP16_TASKS, BF16_TASKS])
def test_boxes_that_were_cut_to_a_line_have_their_partner(limits: TaskLimits) -> None:
    assert match(LINES, replace(LINES, boxes=LINES.boxes + 1e-5), limits).tolist() == [0, 1]
    assert match(LINES, replace(LINES, boxes=LINES.boxes + np.array([0, 1, 0, 1])), limits)[0] == -1


@pytest.mark.parametrize(
    "changed",
    [
        replace(FOUND, boxes=CORNERS + np.array([1.0, 0, 1, 0])),
        replace(FOUND, classes=FOUND.classes + 1),
        replace(FOUND, scores=FOUND.scores * 0.9),
    ],
    ids=["moved by a pixel", "another class", "another score"],
)
@pytest.mark.parametrize("limits", [FP32_TASKS, FP16_TASKS])
def test_what_changed_has_no_partner(changed: Found, limits: object) -> None:
    assert (match(FOUND, changed, limits) == -1).sum() >= 5  # type: ignore[arg-type]


def test_a_mask_that_moved_and_a_keypoint_that_moved_have_no_partner() -> None:
    masks = np.zeros((6, 28, 28), np.float32)
    masks[:, :, 7:14] = 1
    masked = replace(FOUND, masks=masks)
    assert (match(masked, masked, BF16_TASKS) >= 0).all()
    assert (match(masked, replace(FOUND, masks=np.roll(masks, 1, axis=-1)), BF16_TASKS) == -1).all()
    points = np.ones((6, 2, 3), np.float32)
    pointed = replace(FOUND, keypoints=points)
    assert (match(pointed, replace(FOUND, keypoints=points + np.float32(1)), FP16_TASKS) == -1).all()


def test_keypoints_that_are_as_high_elsewhere_are_tied_but_never_many_of_a_thing() -> None:
    points = np.tile(np.array([[10.0, 20, 5]] * 8), (6, 1, 1))
    pointed, turned = replace(FOUND, keypoints=points), points.copy()
    turned[:, 0, 0] += 30
    elsewhere = replace(FOUND, keypoints=turned)
    assert (match(pointed, elsewhere, FP32_TASKS) >= 0).all()
    assert tied_points(pointed, elsewhere, 0, 0, FP32_TASKS).tolist() == [True] + [False] * 7
    lower = replace(FOUND, keypoints=np.where(turned == 5, 4.9, turned))
    assert (match(pointed, lower, FP32_TASKS) == -1).all()
    turned[:, :3, 0] = 40
    assert (match(pointed, replace(FOUND, keypoints=turned), FP32_TASKS) == -1).all()
    assert not tied_points(FOUND, FOUND, 0, 0, FP32_TASKS).any()


@pytest.mark.parametrize(("limits", "pixels"), [(FP32_TASKS, 0.1), (BF16_TASKS, 4.0), (INT8_TASKS, 10.0)])
def test_keypoints_may_move_as_far_as_corners(limits: TaskLimits, pixels: float) -> None:
    assert points_tolerance(np.array([5.0, 5, 45, 25]), limits) == pytest.approx(pixels)


def test_mask_pixels_that_nothing_decides_count_as_the_same() -> None:
    masks = np.full((6, 28, 28), 0.5, np.float32)
    masks[:, :, :14] = 1
    turned = np.where(masks == 0.5, np.float32(0.4999), masks)
    assert (match(replace(FOUND, masks=masks), replace(FOUND, masks=turned), FP32_TASKS) >= 0).all()
