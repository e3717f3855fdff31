"""Which detection of one list is which of another: both found the same things, perhaps in another order."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from graphkiln_backend.proof.policy import TaskLimits

Floats = npt.NDArray[np.float64]
_MASK_LEVEL = 0.5
"""A pixel belongs to an object from this probability."""
_MOST_TIED = 0.25
"""Of the keypoints of a thing: what moves more of them is no tie."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Found:
    """The detections of one image, the best first.

    Attributes:
        boxes: x1, y1, x2, y2 in pixels, `[detections, 4]`.
        scores: `[detections]`.
        classes: `[detections]`.
        masks: Probabilities, `[detections, height, width]`, or None.
        keypoints: x, y, score, `[detections, keypoints, 3]`, or None.
    """

    boxes: Floats
    scores: Floats
    classes: npt.NDArray[np.int64]
    masks: Floats | None = None
    keypoints: Floats | None = None

    def __len__(self) -> int:
        return len(self.scores)


def pairwise_iou(boxes: Floats, others: Floats) -> Floats:
    """Intersection over union of each box with each other, `[boxes, others]`; 1 for two equal boxes without an area."""
    low = np.maximum(boxes[:, None, :2], others[None, :, :2])
    high = np.minimum(boxes[:, None, 2:], others[None, :, 2:])
    shared = np.prod(np.clip(high - low, 0, None), axis=-1)
    union = _areas(boxes)[:, None] + _areas(others)[None] - shared
    equal = np.all(boxes[:, None] == others[None], axis=-1).astype(np.float64)
    return np.asarray(np.divide(shared, union, out=equal, where=union > 0))


def match(reference: Found, judged: Found, limits: TaskLimits) -> npt.NDArray[np.int64]:
    """Pairs detections, the best first, with the one of the same class that overlaps most and is within the limits.

    Returns:
        For each detection of the reference the row of its partner, or -1; `[detections]`.
    """
    partners = np.full(len(reference), -1, np.int64)
    if not len(reference) or not len(judged):
        return partners
    overlap = pairwise_iou(_visible(reference.boxes), _visible(judged.boxes))
    fits = (
        (overlap >= limits.box_iou)
        & (reference.classes[:, None] == judged.classes[None])
        & (np.abs(reference.scores[:, None] - judged.scores[None]) <= score_tolerance(reference, limits))
    )
    if limits.box_pixels is not None:
        moved = np.abs(reference.boxes[:, None] - judged.boxes[None]).max(axis=-1)
        fits &= moved <= limits.box_pixels
    for row in range(len(reference)):
        candidates = np.flatnonzero(fits[row])
        for partner in candidates[np.argsort(-overlap[row, candidates], kind="stable")]:
            if _alike(reference, judged, row, int(partner), limits):
                partners[row] = partner
                fits[:, partner] = False
                break
    return partners


def score_tolerance(reference: Found, limits: TaskLimits) -> float:
    """Most that two scores of one thing may differ on an image."""
    return limits.score * float(np.max(np.abs(reference.scores), initial=0.0))


def tied_points(reference: Found, judged: Found, row: int, partner: int, limits: TaskLimits) -> npt.NDArray[np.bool_]:
    """The keypoints of a pair that stand elsewhere, where their score is the same: nothing decides which it is.

    A keypoint is the highest pixel of a map, and two pixels may be equally high.

    Returns:
        `[keypoints]`; all False where there are none.
    """
    if reference.keypoints is None or judged.keypoints is None:
        return np.zeros(0, np.bool_)
    expected, found = reference.keypoints[row], judged.keypoints[partner]
    height = float(np.max(np.abs(expected[:, 2]), initial=0.0))
    alike = np.abs(expected[:, 2] - found[:, 2]) <= limits.score * height
    return np.asarray(_have_moved(expected, found, points_tolerance(reference.boxes[row], limits)) & alike)


def points_tolerance(box: Floats, limits: TaskLimits) -> float:
    """Pixels that a keypoint may move in a box: as far as its corners may."""
    if limits.box_pixels is not None:
        return limits.box_pixels
    return (1 - limits.box_iou) * float(max(box[2] - box[0], box[3] - box[1], 1.0))


def _visible(boxes: Floats) -> Floats:
    """Boxes that are a pixel wide and high at least: what was cut to a line at the border overlaps nothing."""
    lacking = np.clip(1 - (boxes[:, 2:] - boxes[:, :2]), 0, None) / 2
    return np.concatenate([boxes[:, :2] - lacking, boxes[:, 2:] + lacking], axis=1)


def _areas(boxes: Floats) -> Floats:
    return np.asarray(np.prod(np.clip(boxes[:, 2:] - boxes[:, :2], 0, None), axis=-1))


def _alike(reference: Found, judged: Found, row: int, partner: int, limits: TaskLimits) -> bool:
    """Whether masks and keypoints are those of the same thing, too."""
    if reference.masks is not None and judged.masks is not None:
        overlap = _mask_iou(reference.masks[row], judged.masks[partner], limits.score)
        if overlap < limits.box_iou:
            return False
    if reference.keypoints is None or judged.keypoints is None:
        return True
    tied = tied_points(reference, judged, row, partner, limits)
    allowed = points_tolerance(reference.boxes[row], limits)
    moved = _have_moved(reference.keypoints[row], judged.keypoints[partner], allowed)
    return not np.any(moved & ~tied) and float(tied.sum()) <= _MOST_TIED * len(tied)


def _have_moved(points: Floats, others: Floats, allowed: float) -> npt.NDArray[np.bool_]:
    return np.asarray(np.abs(points[:, :2] - others[:, :2]).max(axis=-1, initial=0.0) > allowed)


def _mask_iou(reference: Floats, judged: Floats, noise: float) -> float:
    """Of the pixels above one half; one that the noise can turn counts as the same."""
    inside = reference >= _MASK_LEVEL
    other = np.where(np.abs(reference - _MASK_LEVEL) <= noise, inside, judged >= _MASK_LEVEL)
    union = int(np.sum(inside | other))
    return float(np.sum(inside & other)) / union if union else 1.0
