"""Agreement of two graphs on detections: matched in any order, then compared.

Rounding swaps detections of nearly equal score, and may push one off the end of a full list. So rows are first brought
into the order of the reference. A detection without a partner counts as a difference, unless its score is so near the
end of the list that it is a near tie.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from graphkiln_backend.graph.dtypes import AnyArray
from graphkiln_backend.graph.task import Detection, output_names
from graphkiln_backend.proof.decision import Metric, TaskDecision
from graphkiln_backend.proof.policy import Limits, TaskLimits

Arrays = Mapping[str, AnyArray]
Floats = npt.NDArray[np.float64]

_MASK_LEVEL = 0.5  # probability from which a pixel belongs to an object
_MOST_TIED = 0.25  # share of an object's keypoints that may be near ties
_DECIDING = "give samples and weights that decide"
_CONTROL_SCALE = 3.0  # a control is moved by this many times the allowed distance, if the row allows more than a pixel


@dataclass(frozen=True, kw_only=True, slots=True)
class Found:
    """Detections of one image, by descending score.

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
    """Compute the IoU of each pair of boxes, `[boxes, others]`; 1 for two equal boxes without area."""
    low = np.maximum(boxes[:, None, :2], others[None, :, :2])
    high = np.minimum(boxes[:, None, 2:], others[None, :, 2:])
    shared = np.prod(np.clip(high - low, 0, None), axis=-1)
    union = _areas(boxes)[:, None] + _areas(others)[None] - shared
    equal = np.all(boxes[:, None] == others[None], axis=-1).astype(np.float64)
    return np.asarray(np.divide(shared, union, out=equal, where=union > 0))


def match(reference: Found, judged: Found, limits: TaskLimits) -> npt.NDArray[np.int64]:
    """Pair each detection, by descending score, with the one of the same class that overlaps most within the limits.

    Returns:
        Row of the partner for each detection of the reference, or -1; `[detections]`.
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
    """Return the allowed score difference on an image."""
    return limits.score * float(np.max(np.abs(reference.scores), initial=0.0))


def tied_points(reference: Found, judged: Found, row: int, partner: int, limits: TaskLimits) -> npt.NDArray[np.bool_]:
    """Find the keypoints of a pair that moved but have the same score.

    A keypoint is the highest pixel of a map, and two pixels may be equally high.

    Returns:
        Mask `[keypoints]`, of length 0 without keypoints.
    """
    if reference.keypoints is None or judged.keypoints is None:
        return np.zeros(0, np.bool_)
    expected, found = reference.keypoints[row], judged.keypoints[partner]
    height = float(np.max(np.abs(expected[:, 2]), initial=0.0))
    alike = np.abs(expected[:, 2] - found[:, 2]) <= limits.score * height
    return np.asarray(_have_moved(expected, found, points_tolerance(reference.boxes[row], limits)) & alike)


def points_tolerance(box: Floats, limits: TaskLimits) -> float:
    """Return the allowed movement of a keypoint in pixels, which is that of the corners of its box."""
    if limits.box_pixels is not None:
        return limits.box_pixels
    return (1 - limits.box_iou) * float(max(box[2] - box[0], box[3] - box[1], 1.0))


def _visible(boxes: Floats) -> Floats:
    """Enlarge boxes to at least a pixel in each direction: a box that is clipped to a line overlaps nothing."""
    lacking = np.clip(1 - (boxes[:, 2:] - boxes[:, :2]), 0, None) / 2
    return np.concatenate([boxes[:, :2] - lacking, boxes[:, 2:] + lacking], axis=1)


def _areas(boxes: Floats) -> Floats:
    return np.asarray(np.prod(np.clip(boxes[:, 2:] - boxes[:, :2], 0, None), axis=-1))


def _alike(reference: Found, judged: Found, row: int, partner: int, limits: TaskLimits) -> bool:
    """Return true if masks and keypoints match as well."""
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
    """Compute the IoU of two masks; pixels within noise of the threshold count as equal."""
    inside = reference >= _MASK_LEVEL
    other = np.where(np.abs(reference - _MASK_LEVEL) <= noise, inside, judged >= _MASK_LEVEL)
    union = int(np.sum(inside | other))
    return float(np.sum(inside & other)) / union if union else 1.0


@dataclass(kw_only=True, slots=True)
class _Alignment:
    """Outputs in the order of the reference, and counts over all images."""

    task: Detection
    reference: Arrays
    outputs: Arrays
    limits: Limits
    aligned: dict[str, AnyArray]
    agreeing: int = 0
    total: int = 0
    near_ties: int = 0
    decisive: int = 0
    score_difference: float = 0.0

    def add(self, image: int) -> None:
        """Match the detections of one image."""
        task, limits = self.task, self.limits
        expected, judged = found_on(task, self.reference, image), found_on(task, self.outputs, image)
        partners = match(expected, judged, limits.tasks)
        tolerance = score_tolerance(expected if len(expected) else judged, limits.tasks)
        matched = partners >= 0
        surplus = np.setdiff1d(np.arange(len(judged)), partners[matched])
        tied = ~matched & _undecided(expected.scores, task, limits, tolerance)
        surplus_tied = _undecided(judged.scores, task, limits, tolerance)[surplus]
        sure = task.score_threshold + tolerance
        self.agreeing += int(matched.sum()) + int(tied.sum())
        self.total += len(expected) + int(np.sum(~surplus_tied))
        self.near_ties += int(tied.sum()) + int(surplus_tied.sum())
        self.decisive += int(np.sum(expected.scores >= task.score_threshold) + np.sum(judged.scores[surplus] > sure))
        differences = np.abs(expected.scores[matched] - judged.scores[partners[matched]])
        self.score_difference = max(self.score_difference, float(differences.max(initial=0.0)))
        for name in output_names(task):
            self.aligned[name][image] = self.reference[name][image]
            if name != task.counts:
                rows = self.outputs[name][image][partners[matched]]
                self.aligned[name][image, : len(expected)][matched] = rows
        self._settle_points(image, expected, judged, partners)

    def _settle_points(self, image: int, expected: Found, judged: Found, partners: npt.NDArray[np.int64]) -> None:
        """Replace keypoints that are near ties by those of the reference, and count them."""
        name = self.task.keypoints
        if name is None:
            return
        for row in np.flatnonzero(partners >= 0):
            tied = tied_points(expected, judged, int(row), int(partners[row]), self.limits.tasks)
            self.aligned[name][image, row][tied] = self.reference[name][image, row][tied]
            self.near_ties += int(tied.sum())


def can_match(task: Detection, reference: Arrays, outputs: Arrays) -> bool:
    """Return true if both have valid detections of the task; otherwise only their numbers can be compared."""
    names = output_names(task)
    if not all(name in arrays for name in names for arrays in (reference, outputs)):
        return False
    alike = all(
        reference[name].shape == outputs[name].shape and reference[name].dtype == outputs[name].dtype for name in names
    )
    counts = (arrays[task.counts].astype(np.int64) for arrays in (reference, outputs))
    rows = reference[task.scores].shape[-1]
    return alike and all(bool(np.all((count >= 0) & (count <= rows))) for count in counts)


def match_detections(
    task: Detection, reference: Arrays, outputs: Arrays, limits: Limits, metric: Metric | None = None
) -> tuple[dict[str, AnyArray], TaskDecision]:
    """Bring detections into the order of the reference, and count the matches.

    Args:
        task: The detection task.
        reference: Trusted outputs by name, `[samples, detections, ...]`.
        outputs: Outputs to judge, for which `can_match` holds.
        limits: Policy row.
        metric: Metric of both, or None.

    Returns:
        Outputs in the reference's order, for the comparison of numbers, and the decision. Rows without a partner are
        copied from the reference; the decision counts them.
    """
    aligned = {name: np.array(array) for name, array in outputs.items()}
    counts = _Alignment(task=task, reference=reference, outputs=outputs, limits=limits, aligned=aligned)
    for image in range(len(reference[task.scores])):
        counts.add(image)
    inconclusive = ""
    is_exact = limits.top1_agreement == 1.0  # rows that require full agreement judge faint detections, too
    if not counts.decisive and not (counts.total and is_exact):
        inconclusive = f"no detection has a score of {task.score_threshold:g} or more; {_DECIDING}"
    decision = TaskDecision(
        what=f"detections matched at IoU {limits.tasks.box_iou}",
        agreeing=counts.agreeing,
        total=counts.total,
        least=limits.top1_agreement,
        near_ties=counts.near_ties,
        detail=f"scores differ by {counts.score_difference:.2g} at most" if counts.agreeing else "",
        metric=metric,
        inconclusive=inconclusive,
    )
    return aligned, decision


def why_undecided(task: Detection, reference: Arrays, limits: Limits) -> str:
    """Return the reason why detections cannot reveal a wrong graph, or empty.

    Either nothing is detected, or half of the images have full lists of nearly equal scores, as with random weights;
    which candidates are on such a list is arbitrary.
    """
    images = [found_on(task, reference, image).scores for image in range(len(reference[task.counts]))]
    if not any(map(len, images)):
        return f"nothing is detected on any of the samples; {_DECIDING}"
    rows = reference[task.scores].shape[-1]
    tied = sum(len(scores) == rows and bool(np.ptp(scores) <= limits.tasks.score * scores.max()) for scores in images)
    if 2 * tied < len(images):
        return ""
    return f"on {tied} of {len(images)} samples all of the {rows} detections have nearly the same score; {_DECIDING}"


def found_on(task: Detection, outputs: Arrays, image: int) -> Found:
    """Return the valid detections of one image."""
    count = int(outputs[task.counts][image])

    def rows(name: str | None) -> npt.NDArray[np.float64] | None:
        return None if name is None else outputs[name][image][:count].astype(np.float64)

    return Found(
        boxes=outputs[task.boxes][image][:count].astype(np.float64),
        scores=outputs[task.scores][image][:count].astype(np.float64),
        classes=outputs[task.classes][image][:count].astype(np.int64),
        masks=rows(task.masks),
        keypoints=rows(task.keypoints),
    )


def detection_controls(task: Detection, reference: Arrays, limits: Limits) -> Iterator[tuple[str, dict[str, AnyArray]]]:
    """Yield negative controls, each with a description of its change.

    The best detection of every image is changed: its box moved by a pixel (more if the row allows a pixel), its class
    swapped, its mask or keypoints moved, or the detection left out.
    """
    images = [image for image, count in enumerate(reference[task.counts]) if count]
    best = [image for image in images if reference[task.scores][image, 0] >= task.score_threshold]
    if not best:
        return
    yield "a box moved", {**reference, task.boxes: _moved_boxes(reference[task.boxes], best, limits)}
    classes = reference[task.classes].astype(np.int64)
    classes[best] ^= 1
    yield "a class swapped", {**reference, task.classes: classes.astype(reference[task.classes].dtype)}
    yield "a detection left out", _without_best(task, reference, best)
    if task.masks is not None:
        masks = np.array(reference[task.masks])
        masks[best] = np.roll(masks[best], masks.shape[-1] // 2, axis=-1)
        yield "a mask moved", {**reference, task.masks: masks}
    if task.keypoints is not None:
        yield "keypoints moved", {**reference, task.keypoints: _moved_points(task, reference, best, limits)}


def _undecided(
    scores: npt.NDArray[np.float64], task: Detection, limits: Limits, tolerance: float
) -> npt.NDArray[np.bool_]:
    """Find the detections that an allowed difference can push out of the list, or below the threshold."""
    if not len(scores):
        return np.zeros(0, np.bool_)
    if not limits.tasks.faint:
        return np.asarray(scores <= max(float(scores.min()), task.score_threshold) + tolerance)
    # In a list of nearly equal scores all would be near ties, so the best one never is.
    return np.asarray((scores <= scores.min() + tolerance) & (scores < scores.max()))


def _moved_boxes(boxes: AnyArray, images: list[int], limits: Limits) -> AnyArray:
    moved = np.array(boxes)
    iou, pixels = limits.tasks.box_iou, limits.tasks.box_pixels
    for image in images:
        width = float(moved[image, 0, 2] - moved[image, 0, 0])
        allowed = width * (1 - iou) / (1 + iou)
        shift = 1.0 if pixels is not None else max(1.0, _CONTROL_SCALE * allowed)
        moved[image, 0, ::2] = boxes[image, 0, ::2].astype(np.float64) + shift
    return moved


def _moved_points(task: Detection, reference: Arrays, images: list[int], limits: Limits) -> AnyArray:
    moved = np.array(reference[task.keypoints or ""])
    for image in images:
        allowed = points_tolerance(reference[task.boxes][image, 0].astype(np.float64), limits.tasks)
        moved[image, 0, :, :2] = moved[image, 0, :, :2].astype(np.float64) + max(1.0, _CONTROL_SCALE * allowed)
    return moved


def _without_best(task: Detection, reference: Arrays, images: list[int]) -> dict[str, AnyArray]:
    changed = {name: np.array(array) for name, array in reference.items()}
    for name in output_names(task):
        if name == task.counts:
            changed[name][images] = reference[name].astype(np.int64)[images] - 1
            continue
        changed[name][images] = np.roll(changed[name][images], -1, axis=1)
        changed[name][images, -1] = 0
    return changed
