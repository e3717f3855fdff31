"""Detections compared in any order: matching, changes that are refused, near ties, undecided samples."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from pycocotools import mask as coco
from task_outputs import DETECTION, detector_outputs

from graphkiln_backend.graph.dtypes import AnyArray
from graphkiln_backend.proof.detections import (
    Found,
    can_match,
    detection_controls,
    match,
    match_detections,
    pairwise_iou,
    points_tolerance,
    tied_points,
    why_undecided,
)
from graphkiln_backend.proof.policy import (
    BF16,
    BF16_TASKS,
    EXPORT,
    FP16,
    FP16_TASKS,
    FP32_TASKS,
    INT8,
    INT8_TASKS,
    OTHER_ENGINE,
    Limits,
    TaskLimits,
)

ROWS = [EXPORT, OTHER_ENGINE, FP16, BF16, INT8]
REFERENCE = detector_outputs()


def passes(outputs: dict[str, AnyArray], limits: Limits, reference: dict[str, AnyArray] = REFERENCE) -> bool:
    return match_detections(DETECTION, reference, outputs, limits)[1].within(limits)


def changed(name: str, row: int, value: object) -> dict[str, AnyArray]:
    outputs = {name: array.copy() for name, array in REFERENCE.items()}
    outputs[name][:, row] += np.asarray(value).astype(outputs[name].dtype)
    return outputs


@pytest.mark.parametrize("limits", ROWS)
def test_equal_detections_match(limits: Limits) -> None:
    aligned, decision = match_detections(DETECTION, REFERENCE, REFERENCE, limits)
    assert decision.within(limits)
    assert (decision.agreeing, decision.total, decision.near_ties) == (12, 12, 0)
    assert all(np.array_equal(aligned[name], REFERENCE[name]) for name in REFERENCE)


def test_order_is_restored() -> None:
    order = [1, 0, 2, 3, 4, 5]
    shuffled = {name: array[:, order] if array.ndim > 1 else array for name, array in REFERENCE.items()}
    aligned, decision = match_detections(DETECTION, REFERENCE, shuffled, EXPORT)
    assert decision.within(EXPORT)
    assert np.array_equal(aligned["boxes"], REFERENCE["boxes"])


@pytest.mark.parametrize("limits", [EXPORT, OTHER_ENGINE, FP16])
def test_box_moved_by_a_pixel(limits: Limits) -> None:
    assert not passes(changed("boxes", 0, [1, 0, 1, 0]), limits)


POINTED = replace(DETECTION, keypoints="points")


def pointed(elsewhere: int = 0) -> dict[str, AnyArray]:
    """Eight keypoints of each thing; the first ones of the first thing are ten pixels away, with equal scores."""
    points = np.tile(np.array([20, 30, 4], np.float32), (3, 6, 8, 1))
    points[:, 0, :elsewhere, 0] += 10
    return {**REFERENCE, "points": points}


@pytest.mark.parametrize("limits", ROWS)
def test_moved_keypoints(limits: Limits) -> None:
    outputs = dict(detection_controls(POINTED, pointed(), limits))["keypoints moved"]
    assert np.abs(outputs["points"] - pointed()["points"]).max() >= 1
    assert not match_detections(POINTED, pointed(), outputs, limits)[1].within(limits)


def test_undecided_keypoint_is_a_near_tie() -> None:
    aligned, decision = match_detections(POINTED, pointed(), pointed(elsewhere=1), EXPORT)
    assert (decision.agreeing, decision.total, decision.near_ties) == (12, 12, 3)
    assert np.array_equal(aligned["points"], pointed()["points"])
    assert match_detections(POINTED, pointed(), pointed(elsewhere=3), EXPORT)[1].agreeing == 9


def test_additional_detections() -> None:
    def one_more(score: float) -> dict[str, AnyArray]:
        outputs = {name: array.copy() for name, array in REFERENCE.items()}
        outputs["counts"] += np.int32(1)
        outputs["boxes"][:, 4], outputs["scores"][:, 4] = (300, 10, 340, 50), score
        return outputs

    assert not passes(one_more(0.9), EXPORT)
    _, decision = match_detections(DETECTION, REFERENCE, one_more(0.64), EXPORT)
    assert decision.within(EXPORT)
    assert decision.near_ties == 3
    assert "3 near ties" in str(decision)


def test_detections_below_the_threshold() -> None:
    faint = {name: array.copy() for name, array in REFERENCE.items()}
    faint["scores"][:, 2] = 0.3
    faint["scores"][:, 3] = 0.1
    moved = {name: array.copy() for name, array in faint.items()}
    moved["boxes"][:, 2] += np.float32(100)
    assert not passes(moved, EXPORT, faint)
    assert not passes(moved, FP16, faint)
    assert passes(moved, BF16, faint)
    assert passes(moved, INT8, faint)


def test_samples_without_detections() -> None:
    empty = {name: np.zeros_like(array) for name, array in REFERENCE.items()}
    _, decision = match_detections(DETECTION, empty, empty, INT8)
    assert decision.within(INT8)
    assert "not judged" in str(decision)
    assert list(detection_controls(DETECTION, empty, EXPORT)) == []
    assert not passes(REFERENCE, INT8, empty)
    assert not passes(REFERENCE, EXPORT, empty)


def test_outputs_that_are_no_detections() -> None:
    assert can_match(DETECTION, REFERENCE, REFERENCE)
    assert not can_match(DETECTION, REFERENCE, {**REFERENCE, "counts": REFERENCE["counts"] + np.int32(9)})
    assert not can_match(DETECTION, REFERENCE, {**REFERENCE, "boxes": REFERENCE["boxes"][:, :2]})
    assert not can_match(DETECTION, REFERENCE, {name: array for name, array in REFERENCE.items() if name != "boxes"})


class TestUndecided:
    def full(self, *scores: float) -> dict[str, AnyArray]:
        """Lists without an empty row; the scores are those of the rows."""
        outputs = detector_outputs(objects=6)
        outputs["scores"][:] = np.float32(scores)
        return outputs

    def test_no_detection_on_any_image(self) -> None:
        empty = {name: np.zeros_like(array) for name, array in REFERENCE.items()}
        assert "nothing is detected" in why_undecided(DETECTION, empty, EXPORT)
        one = {**empty, "counts": np.array([0, 1, 0], np.int32)}
        assert why_undecided(DETECTION, one, EXPORT) == ""

    def test_full_lists_of_tied_scores(self) -> None:
        tied = self.full(*np.linspace(0.01, 0.010001, 6))
        assert "on 3 of 3 samples all of the 6 detections" in why_undecided(DETECTION, tied, EXPORT)
        assert why_undecided(DETECTION, self.full(0.9, 0.5, 0.4, 0.3, 0.2, 0.1), EXPORT) == ""


GENERATOR = np.random.default_rng(5)
CORNERS = np.sort(GENERATOR.uniform(0, 100, (6, 2, 2)), axis=1).reshape(6, 4)
FOUND = Found(boxes=CORNERS, scores=np.linspace(0.9, 0.4, 6), classes=np.arange(6))


def test_overlaps_equal_pycocotools() -> None:
    others = np.sort(GENERATOR.uniform(0, 100, (9, 2, 2)), axis=1).reshape(9, 4)
    sizes = [np.hstack([boxes[:, :2], boxes[:, 2:] - boxes[:, :2]]) for boxes in (CORNERS, others)]
    expected = coco.iou(*sizes, [False] * 9)
    np.testing.assert_allclose(pairwise_iou(CORNERS, others), expected, atol=1e-12)


LINES = Found(
    boxes=np.array([[121.9, 0, 179.4, 0], [0, 65.1, 0, 167.8]]), scores=np.array([0.9, 0.8]), classes=np.array([1, 1])
)
# boxes clipped at the border of the image


@pytest.mark.parametrize("limits", [FP32_TASKS, FP16_TASKS, BF16_TASKS])
def test_boxes_clipped_to_a_line_match(limits: TaskLimits) -> None:
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
def test_changed_detections_do_not_match(changed: Found, limits: object) -> None:
    assert (match(FOUND, changed, limits) == -1).sum() >= 5  # type: ignore[arg-type]


def test_moved_masks_and_keypoints_do_not_match() -> None:
    masks = np.zeros((6, 28, 28), np.float32)
    masks[:, :, 7:14] = 1
    masked = replace(FOUND, masks=masks)
    assert (match(masked, masked, BF16_TASKS) >= 0).all()
    assert (match(masked, replace(FOUND, masks=np.roll(masks, 1, axis=-1)), BF16_TASKS) == -1).all()
    points = np.ones((6, 2, 3), np.float32)
    pointed = replace(FOUND, keypoints=points)
    assert (match(pointed, replace(FOUND, keypoints=points + np.float32(1)), FP16_TASKS) == -1).all()


def test_tied_keypoints() -> None:
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
def test_tolerance_of_keypoints(limits: TaskLimits, pixels: float) -> None:
    assert points_tolerance(np.array([5.0, 5, 45, 25]), limits) == pytest.approx(pixels)


def test_undecided_mask_pixels() -> None:
    masks = np.full((6, 28, 28), 0.5, np.float32)
    masks[:, :, :14] = 1
    turned = np.where(masks == 0.5, np.float32(0.4999), masks)
    assert (match(replace(FOUND, masks=masks), replace(FOUND, masks=turned), FP32_TASKS) >= 0).all()
