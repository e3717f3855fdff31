"""Metrics on labeled images: COCO mAP, mIoU, recall@1."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from graphkiln_backend.graph.dtypes import AnyArray
from graphkiln_backend.graph.errors import VerificationError
from graphkiln_backend.graph.task import Detection, Embedding, Segmentation, Task
from graphkiln_backend.proof.class_maps import class_map
from graphkiln_backend.proof.decision import Metric
from graphkiln_backend.proof.detections import Found, found_on

Arrays = Mapping[str, AnyArray]

UNKNOWN = -1  # the class of pixels that are not counted, because nobody knows theirs


@dataclass(frozen=True, kw_only=True, slots=True)
class Objects:
    """Objects on one image.

    Attributes:
        boxes: x1, y1, x2, y2 in pixels of the model's input, `[objects, 4]`.
        classes: Lines of the labels file, the first is 0, `[objects]`.
    """

    boxes: npt.NDArray[np.float64]
    classes: npt.NDArray[np.int64]


# Of a detection the objects of each sample; of a segmentation its class maps, `[samples, height, width]` over the
# model's input, `UNKNOWN` where nothing is known; of an embedding the class of each sample, `[samples]`.
TaskTargets = Sequence[Objects] | npt.NDArray[np.int64]


def measure(task: Task | None, reference: Arrays, outputs: Arrays, targets: TaskTargets) -> Metric | None:
    """The metric of a task, of the reference and of what is judged; None where the targets are not of that kind."""
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
        task: Which outputs the detections are.
        outputs: By name, `[samples, detections, ...]`.
        targets: The objects of each sample.
        iou: From which overlap a detection counts as right; None for COCO's mean over 0.5, 0.55, ... 0.95.

    Raises:
        VerificationError: No sample has an object.

    Source: pycocotools, the reference implementation of the COCO metric.
    """
    from pycocotools.coco import COCO
    from pycocotools.cocoeval import COCOeval

    if not any(len(objects.classes) for objects in targets):
        raise VerificationError("the labels prove nothing", report="no sample has an object")
    found = [_coco_results(image, found_on(task, outputs, image)) for image in range(len(targets))]
    results = [result for results in found for result in results]
    if not results:
        return 0.0
    truth = COCO()
    truth.dataset = _coco_dataset(targets, {int(result["category_id"]) for result in results})
    with contextlib.redirect_stdout(io.StringIO()):  # it reports its progress
        truth.createIndex()
        evaluation = COCOeval(truth, truth.loadRes(results), "bbox")
        if iou is not None:
            evaluation.params.iouThrs = np.array([iou])
        evaluation.evaluate()
        evaluation.accumulate()
    precision = evaluation.eval["precision"][..., 0, -1]  # all areas, up to 100 detections of an image
    return float(np.mean(precision[precision > -1]))


def mean_iou(classes: npt.NDArray[np.int64], targets: npt.NDArray[np.int64]) -> float:
    """Mean over the classes of intersection over union, each over all samples, 0..1.

    Args:
        classes: Of each pixel, `[samples, height, width]`.
        targets: The right ones, at any size: taken at the middle of each pixel of `classes`; `UNKNOWN` counts nowhere.

    Raises:
        VerificationError: Nothing is known of any pixel.
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
    """Share of samples whose nearest other sample, by cosine, is of the same class, 0..1.

    Args:
        vectors: `[samples, features]`; two samples at least.
        targets: Class of each, `[samples]`.
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
    """The objects as COCO's format has them; a class that was found but is on no image is known, too."""
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
