"""Post-processing of graphs of the YOLO kind, image by image in NumPy: the reference of what is appended to them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from graphkiln_backend.graph.dtypes import AnyArray
from graphkiln_converters.detection.options import Head
from graphkiln_converters.detection.suppression import Floats, keep
from graphkiln_converters.detection.yolo import Settings

Rows = list[tuple[AnyArray, float, int]]
"""Box as x1, y1, x2, y2 in pixels, score, class."""


def detect(found: AnyArray, settings: Settings) -> dict[str, AnyArray]:
    """What `RawHead` and `EndToEndHead` return for an output of a graph.

    Source: Ultralytics `non_max_suppression`, with classes apart in place of boxes that are moved apart by class.
    """
    return pad_rows([_rows(each.astype(np.float32), settings) for each in found], settings.max_detections)


def selected(boxes: AnyArray, scores: AnyArray, chosen: Sequence[AnyArray], settings: Settings) -> dict[str, AnyArray]:
    """What `SelectedHead` returns, from what the graph's own NonMaxSuppression chose.

    Args:
        boxes: `[batch, boxes, 4]`.
        scores: `[batch, classes, boxes]`.
        chosen: Of each image `[selected, 3]`: 0, class, box.
        settings: Format of the boxes, and how many are returned.
    """
    images = [
        [
            (_corners(boxes[row, box].astype(np.float32), settings), float(scores[row, number, box]), int(number))
            for _, number, box in of_image
        ]
        for row, of_image in enumerate(chosen)
    ]
    return pad_rows([sorted(image, key=lambda each: -each[1]) for image in images], settings.max_detections)


def pad_rows(images: Sequence[Rows], count: int) -> dict[str, AnyArray]:
    """Detections of each image, best first, as `Candidates.padded` returns them."""
    padded: dict[str, AnyArray] = {
        "boxes": np.zeros((len(images), count, 4), np.float32),
        "scores": np.zeros((len(images), count), np.float32),
        "classes": np.zeros((len(images), count), np.int64),
        "counts": np.array([min(count, len(rows)) for rows in images], np.int32),
    }
    for number, rows in enumerate(images):
        for place, values in enumerate(rows[:count]):
            for name, value in zip(("boxes", "scores", "classes"), values, strict=True):
                padded[name][number, place] = value
    return padded


def _rows(found: Floats, settings: Settings) -> Rows:
    if settings.head is Head.END_TO_END:
        return _finished(found, settings)
    scored = _scored_v5(found) if settings.head is Head.YOLOV5 else (found[:4].T, found[4:].T)
    boxes: Floats = np.stack([_corners(box, settings) for box in scored[0]])
    return sorted(_suppressed(boxes, scored[1], settings), key=lambda each: -each[1])


def _finished(found: Floats, settings: Settings) -> Rows:
    rows = [row for row in found if row[4] > settings.least_score]
    return [(_corners(row[:4], settings), row[4], round(float(row[5]))) for row in sorted(rows, key=_falling)]


def _scored_v5(rows: Floats) -> tuple[Floats, Floats]:
    return rows[:, :4], rows[:, 5:] * rows[:, 4:5]


def _falling(row: Floats) -> float:
    return -float(row[4])


def _suppressed(boxes: Floats, scores: Floats, settings: Settings) -> Iterator[tuple[AnyArray, float, int]]:
    classes, best = scores.argmax(1), scores.max(1)
    for number in range(scores.shape[1]):
        (members,) = np.nonzero((classes == number) & (best > settings.least_score))
        for index in members[keep(boxes[members], best[members], settings.iou_threshold)]:
            yield boxes[index], best[index], number


def _corners(box: Floats, settings: Settings) -> Floats:
    form, _, unit = settings.boxes.value.partition("-")
    height, width = settings.size if unit else (1, 1)
    a, b, c, d = (float(value) for value in box)
    a, b, c, d = {"yxyx": (b, a, d, c), "cxcywh": (a - c / 2, b - d / 2, a + c / 2, b + d / 2)}.get(form, (a, b, c, d))
    return np.array([a * width, b * height, c * width, d * height], np.float32)
