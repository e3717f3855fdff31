"""Comparison of task results: detections, class maps, embeddings; and their metrics on labeled images."""

from __future__ import annotations

import contextlib
import io
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from graphkiln_backend.graph.dtypes import AnyArray
from graphkiln_backend.graph.errors import VerificationError
from graphkiln_backend.graph.task import Detection, Embedding, Segmentation, Task, output_names
from graphkiln_backend.proof import detections
from graphkiln_backend.proof.decision import Metric, TaskDecision
from graphkiln_backend.proof.detections import Found, can_match, detection_controls, found_on, match_detections
from graphkiln_backend.proof.policy import OTHER_ENGINE, Limits

Arrays = Mapping[str, AnyArray]
_Classes = npt.NDArray[np.int64]


def output_of(task: Segmentation) -> str:
    """Return the name of the output with the classes."""
    return task.scores or task.classes or ""


def class_map(task: Segmentation, outputs: Arrays) -> _Classes:
    """Return the class of each pixel, `[samples, height, width]`."""
    array = outputs[output_of(task)]
    return np.asarray(array.argmax(axis=1) if task.scores else array, np.int64)


def decide_pixels(
    task: Segmentation,
    reference: Arrays,
    outputs: Arrays,
    limits: Limits,
    *,
    noise: float,
    metric: Metric | None = None,
) -> TaskDecision:
    """Compare the classes of all pixels.

    A pixel that differs is a near tie if the reference's scores of its two classes differ by no more than the noise:
    the measured noise of fp32, or the score differences observed here, up to the numeric limit of the row.

    Args:
        task: The segmentation.
        reference: Trusted outputs by name.
        outputs: Outputs to judge, of the same shapes.
        limits: Policy row.
        noise: Largest score difference caused by fp32 itself; 0 if unknown.
        metric: Metric of both, or None.
    """
    before, after = class_map(task, reference), class_map(task, outputs)
    margins = _margins(task, reference, before != after, after)
    noise = max(noise, _observed_noise(task, reference, outputs, limits) if margins.size else 0.0)
    tied = margins[margins <= noise]
    return TaskDecision(
        what="pixels of the same class",
        agreeing=int(before.size - margins.size + tied.size),
        total=int(before.size),
        least=limits.tasks.equal_pixels,
        detail=f"which a difference of {tied.max():.2g} decides" if tied.size else "",
        near_ties=int(tied.size),
        metric=metric,
        inconclusive=_inconclusive(before, limits),
    )


def pixel_controls(task: Segmentation, reference: Arrays, limits: Limits) -> Iterator[tuple[str, dict[str, AnyArray]]]:
    """Yield negative controls: the map shifted, two classes swapped.

    The shift is one pixel, or more until it changes more pixels than the row allows.
    """
    name, classes = output_of(task), class_map(task, reference)
    if len(np.unique(classes)) < 2:
        return
    array, pixels = reference[name], 1
    while (
        pixels < classes.shape[-1] and _share(classes, np.roll(classes, pixels, axis=-1)) >= limits.tasks.equal_pixels
    ):
        pixels *= 2
    if pixels < classes.shape[-1]:
        yield f"the map moved by {pixels} pixels", {**reference, name: np.roll(array, pixels, axis=-1)}
    first, second = np.unique(classes)[np.argsort(-np.unique(classes, return_counts=True)[1])][:2]
    yield "two classes swapped", {**reference, name: _swap(task, array, int(first), int(second))}


def _share(classes: _Classes, others: _Classes) -> float:
    return float(np.mean(classes == others))


def _swap(task: Segmentation, array: AnyArray, first: int, second: int) -> AnyArray:
    if task.scores:
        order = np.arange(array.shape[1])
        order[[first, second]] = second, first
        return array[:, order]
    swapped = np.where(array == second, np.array(first, array.dtype), array)
    return np.where(array == first, np.array(second, array.dtype), swapped)


def _margins(
    task: Segmentation, reference: Arrays, differ: npt.NDArray[np.bool_], after: _Classes
) -> npt.NDArray[np.float64]:
    """Return the reference's margin between its own class and the other one, for each pixel that differs.

    Infinite for a map of classes without scores.
    """
    if not task.scores:
        return np.full(int(differ.sum()), np.inf)
    scores = np.moveaxis(reference[task.scores], 1, -1)[differ].astype(np.float64)
    chosen = np.take_along_axis(scores, after[differ][:, np.newaxis], axis=-1)
    with np.errstate(invalid="ignore"):  # two infinite scores give NaN, which is not a near tie
        return np.asarray(scores.max(axis=-1, initial=-np.inf) - chosen[:, 0])


def _observed_noise(task: Segmentation, reference: Arrays, outputs: Arrays, limits: Limits) -> float:
    """Return the largest observed score difference, capped at what an fp32 row allows.

    Without the cap the difference caused by a fault would excuse it. Rows of lower precisions need no noise, since
    their share of equal pixels leaves room for ties.
    """
    if not task.scores or limits.relative_l2 > OTHER_ENGINE.relative_l2:
        return 0.0
    pairs = zip(reference[task.scores], outputs[task.scores], strict=True)
    measured = [_measure(expected, found) for expected, found in pairs]
    signal = math.sqrt(sum(square for _, square in measured) / len(measured))
    return min(max(largest for largest, _ in measured), limits.relative_l2 * signal)


def _measure(expected: AnyArray, found: AnyArray) -> tuple[float, float]:
    """Return the largest score difference of one sample and the mean square of its scores, where both are finite."""
    exact = expected.astype(np.float64)
    with np.errstate(invalid="ignore"):
        difference = np.abs(found.astype(np.float64) - exact)
    finite = np.isfinite(difference)
    mean = float(np.mean(np.square(exact), where=finite)) if finite.any() else 0.0
    return float(np.max(difference, initial=0.0, where=finite)), mean


def _inconclusive(classes: _Classes, limits: Limits) -> str:
    if limits.tasks.faint or len(np.unique(classes)) > 1:
        return ""
    return "every pixel has the same class; give samples and weights that decide"


# Metrics on labeled images: COCO mAP, mIoU, recall@1.

UNKNOWN = -1  # class of unlabeled pixels, which do not count


@dataclass(frozen=True, kw_only=True, slots=True)
class Objects:
    """Objects on one image.

    Attributes:
        boxes: x1, y1, x2, y2 in pixels of the model's input, `[objects, 4]`.
        classes: Lines of the labels file, the first is 0, `[objects]`.
    """

    boxes: npt.NDArray[np.float64]
    classes: npt.NDArray[np.int64]


# Labels. Detection: objects of each sample. Segmentation: class maps over the input, `[samples, height, width]`,
# with `UNKNOWN` for unlabeled pixels. Embedding: class of each sample, `[samples]`.
TaskTargets = Sequence[Objects] | npt.NDArray[np.int64]


def measure(task: Task | None, reference: Arrays, outputs: Arrays, targets: TaskTargets) -> Metric | None:
    """Compute the metric of a task for both outputs; return None if the targets do not fit the task."""
    if isinstance(task, Detection) and not isinstance(targets, np.ndarray):
        before, after = (detection_map(task, arrays, targets) for arrays in (reference, outputs))
        return Metric(name="mAP", before=before, after=after)
    if not isinstance(targets, np.ndarray):
        return None
    if isinstance(task, Segmentation) and targets.ndim == 3:
        before, after = (mean_iou(class_map(task, arrays), targets) for arrays in (reference, outputs))
        return Metric(name="mIoU", before=before, after=after)
    if isinstance(task, Embedding) and targets.ndim == 1:
        before, after = (recall_at_1(arrays[task.vectors], targets) for arrays in (reference, outputs))
        return Metric(name="recall@1", before=before, after=after)
    return None


def detection_map(task: Detection, outputs: Arrays, targets: Sequence[Objects], iou: float | None = None) -> float:
    """COCO's mean average precision, 0..1.

    Args:
        task: The detection task.
        outputs: Outputs by name, `[samples, detections, ...]`.
        targets: Objects of each sample.
        iou: IoU threshold; None for COCO's mean over 0.5, 0.55, ... 0.95.

    Raises:
        VerificationError: No sample has an object.

    Source: pycocotools, the reference implementation of the COCO metric.
    """
    from pycocotools.coco import COCO
    from pycocotools.cocoeval import COCOeval

    if not any(len(objects.classes) for objects in targets):
        raise VerificationError("the labels prove nothing", report="no sample has a labeled object")
    found = [_coco_results(image, found_on(task, outputs, image)) for image in range(len(targets))]
    results = [result for results in found for result in results]
    if not results:
        return 0.0
    truth = COCO()
    truth.dataset = _coco_dataset(targets, {int(result["category_id"]) for result in results})
    with contextlib.redirect_stdout(io.StringIO()):  # it prints its progress
        truth.createIndex()
        evaluation = COCOeval(truth, truth.loadRes(results), "bbox")
        if iou is not None:
            evaluation.params.iouThrs = np.array([iou])
        evaluation.evaluate()
        evaluation.accumulate()
    precision = evaluation.eval["precision"][..., 0, -1]  # all areas, up to 100 detections of an image
    return float(np.mean(precision[precision > -1]))


def mean_iou(classes: npt.NDArray[np.int64], targets: npt.NDArray[np.int64]) -> float:
    """Mean over classes of the intersection over union over all samples, 0..1.

    Args:
        classes: Class of each pixel, `[samples, height, width]`.
        targets: Class maps of any size, sampled at the center of each pixel of `classes`; `UNKNOWN` does not count.

    Raises:
        VerificationError: No pixel is labeled.
    """
    rows, columns = (
        ((np.arange(size) + 0.5) * full / size).astype(np.int64)
        for size, full in zip(classes.shape[1:], targets.shape[1:], strict=True)
    )
    right = targets[:, rows][:, :, columns]
    known = right != UNKNOWN
    if not known.any():
        raise VerificationError("the labels prove nothing", report="no pixel has a class")
    shares = []
    for value in np.union1d(classes[known], right[known]):
        found, wanted = known & (classes == value), right == value
        shares.append(np.sum(found & wanted) / np.sum(found | wanted))
    return float(np.mean(shares))


def recall_at_1(vectors: AnyArray, targets: npt.NDArray[np.int64]) -> float:
    """Share of samples whose nearest other sample by cosine has the same class, 0..1.

    Args:
        vectors: `[samples, features]`, at least two samples.
        targets: Class of each sample, `[samples]`.
    """
    exact = vectors.astype(np.float64)
    exact = exact / np.maximum(np.linalg.norm(exact, axis=1, keepdims=True), np.finfo(np.float64).tiny)
    likeness = exact @ exact.T
    np.fill_diagonal(likeness, -np.inf)
    return float(np.mean(targets[likeness.argmax(axis=1)] == targets))


def _coco_results(image: int, found: Found) -> list[dict[str, Any]]:
    return [
        {"image_id": image + 1, "category_id": int(value), "bbox": _coco_box(box), "score": float(score)}
        for box, score, value in zip(found.boxes, found.scores, found.classes, strict=True)
    ]


def _coco_dataset(targets: Sequence[Objects], found: set[int]) -> dict[str, Any]:
    """Return the objects in COCO's format, with the categories of all labels and detections."""
    annotations: list[dict[str, Any]] = []
    for image, objects in enumerate(targets, 1):
        for box, value in zip(objects.boxes, objects.classes, strict=True):
            annotations.append(
                {
                    "id": len(annotations) + 1,
                    "image_id": image,
                    "category_id": int(value),
                    "bbox": _coco_box(box),
                    "area": float(np.prod(box[2:] - box[:2])),
                    "iscrowd": 0,
                }
            )
    classes = found | {int(annotation["category_id"]) for annotation in annotations}
    return {
        "info": {},
        "images": [{"id": image} for image in range(1, len(targets) + 1)],
        "annotations": annotations,
        "categories": [{"id": value} for value in sorted(classes)],
    }


def _coco_box(box: npt.NDArray[np.float64]) -> list[float]:
    """x, y, width, height."""
    return [float(box[0]), float(box[1]), float(box[2] - box[0]), float(box[3] - box[1])]


_CONTROL_SCALE = 3.0  # a control is turned by this many times the allowed angle


def cosines(vectors: AnyArray, others: AnyArray) -> npt.NDArray[np.float64]:
    """Compute the cosine of each pair of rows, `[samples]`; 1 for two zero vectors, 0 for one."""
    left, right = vectors.astype(np.float64), others.astype(np.float64)
    lengths = np.linalg.norm(left, axis=1) * np.linalg.norm(right, axis=1)
    alike = np.all(left == right, axis=1).astype(np.float64)
    return np.asarray(np.divide(np.sum(left * right, axis=1), lengths, out=alike, where=lengths > 0))


def decide_vectors(
    task: Embedding, reference: Arrays, outputs: Arrays, limits: Limits, metric: Metric | None = None
) -> TaskDecision:
    """Compare vectors sample by sample, since the error of a batch can hide a single wrong vector.

    Args:
        task: The embedding.
        reference: Trusted outputs by name, `[samples, features]`.
        outputs: Outputs to judge, of the same shape.
        limits: Policy row.
        metric: Metric of both, or None.
    """
    found = cosines(reference[task.vectors], outputs[task.vectors])
    return TaskDecision(
        what=f"vectors with a cosine of {limits.tasks.cosine:.10g} or more",
        agreeing=int(np.sum(found >= limits.tasks.cosine)),
        total=len(found),
        least=1.0,
        detail=f"the worst has {found.min():.7g}" if len(found) else "",
        metric=metric,
    )


def vector_controls(task: Embedding, reference: Arrays, limits: Limits) -> Iterator[tuple[str, dict[str, AnyArray]]]:
    """Yield a negative control: the longest vector, rotated by more than the allowed angle."""
    vectors = reference[task.vectors]
    lengths = np.linalg.norm(vectors.astype(np.float64), axis=1)
    if vectors.shape[1] < 2 or not lengths.any():
        return
    row = int(lengths.argmax())
    angle = min(np.pi / 2, _CONTROL_SCALE * float(np.arccos(limits.tasks.cosine)))
    turned = np.array(vectors)
    turned[row] = _turn(vectors[row].astype(np.float64), angle)
    yield "a vector rotated", {**reference, task.vectors: turned}


def _turn(vector: npt.NDArray[np.float64], angle: float) -> npt.NDArray[np.float64]:
    """Rotate a vector by an angle in radians towards the axis of its smallest component."""
    across = np.zeros_like(vector)
    across[np.abs(vector).argmin()] = 1.0
    across -= vector * (across @ vector) / (vector @ vector)
    return np.asarray(np.cos(angle) * vector + np.sin(angle) * np.linalg.norm(vector) * across / np.linalg.norm(across))


@dataclass(frozen=True, kw_only=True, slots=True)
class Judgment:
    """Decision on the outputs of a task.

    Attributes:
        outputs: Outputs to compare numerically, in the order of the reference.
        decisions: One decision, or none if the outputs cannot be interpreted; the numeric comparison then reports why.
    """

    outputs: Arrays
    decisions: tuple[TaskDecision, ...] = ()


def judge(
    task: Task | None,
    reference: Arrays,
    outputs: Arrays,
    limits: Limits,
    *,
    noise: float = 0.0,
    targets: TaskTargets | None = None,
) -> Judgment:
    """Compare task results.

    Args:
        task: Task of the version; None and classifications are judged by `decision`.
        reference: Trusted outputs by name, `[samples, ...]` each.
        outputs: Outputs to judge.
        limits: Policy row.
        noise: Largest score difference caused by fp32 itself.
        targets: Labels of the samples, or None.
    """
    if not is_judged(task) or not _readable(task, reference, outputs):
        return Judgment(outputs=outputs)
    metric = measure(task, reference, outputs, targets) if targets is not None else None
    if isinstance(task, Detection):
        aligned, decision = match_detections(task, reference, outputs, limits, metric)
        return Judgment(outputs=aligned, decisions=(decision,))
    if isinstance(task, Segmentation):
        return Judgment(
            outputs=_settle_pixels(task, reference, outputs),
            decisions=(decide_pixels(task, reference, outputs, limits, noise=noise, metric=metric),),
        )
    if isinstance(task, Embedding):
        return Judgment(outputs=outputs, decisions=(decide_vectors(task, reference, outputs, limits, metric),))
    return Judgment(outputs=outputs)


def why_undecided(task: Task | None, reference: Arrays, limits: Limits) -> str:
    """Return the reason why a reference of detections cannot reveal a wrong graph, or empty."""
    if not isinstance(task, Detection) or not can_match(task, reference, reference):
        return ""
    return detections.why_undecided(task, reference, limits)


def is_judged(task: Task | None) -> bool:
    """Return true for a detection, segmentation or embedding."""
    return isinstance(task, Detection | Segmentation | Embedding)


def check_controls(task: Task | None, reference: Arrays, limits: Limits) -> tuple[str, ...]:
    """Require that the judgment refuses changed copies of the reference (negative controls).

    Returns:
        Descriptions of the changes; empty if the samples contain nothing to change.

    Raises:
        VerificationError: A changed copy passed.
    """
    controls = list(_controls(task, reference, limits))
    passed = [change for change, changed in controls if _passes(task, reference, changed, limits)]
    if passed:
        raise VerificationError(
            "the check cannot tell a changed copy from the reference",
            report=f"negative control passed: {', '.join(passed)}",
            hint="report this: the comparison is broken",
        )
    return tuple(change for change, _ in controls)


def _passes(task: Task | None, reference: Arrays, changed: Arrays, limits: Limits) -> bool:
    decisions = judge(task, reference, changed, limits).decisions
    return all(decision.within(limits) for decision in decisions)


def _controls(task: Task | None, reference: Arrays, limits: Limits) -> Iterator[tuple[str, dict[str, AnyArray]]]:
    if not is_judged(task) or not _readable(task, reference, reference):
        return
    if isinstance(task, Detection):
        yield from detection_controls(task, reference, limits)
    elif isinstance(task, Segmentation):
        yield from pixel_controls(task, reference, limits)
    elif isinstance(task, Embedding):
        yield from vector_controls(task, reference, limits)


def _readable(task: Task | None, reference: Arrays, outputs: Arrays) -> bool:
    """Return true if both have the outputs of the task, in the same shapes, with at least one sample."""
    if task is None:
        return False
    if isinstance(task, Detection):
        return can_match(task, reference, outputs)
    names = output_names(task)
    return all(name in reference and name in outputs for name in names) and all(
        reference[name].shape == outputs[name].shape and reference[name].size for name in names
    )


def _settle_pixels(task: Segmentation, reference: Arrays, outputs: Arrays) -> Arrays:
    """Replace a class map by the reference, since the decision counts its pixels."""
    return {**outputs, task.classes: reference[task.classes]} if task.classes else outputs
