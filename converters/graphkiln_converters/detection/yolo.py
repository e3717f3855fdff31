"""Post-processing of YOLO graphs: exportable PyTorch with a batch, a NumPy reference, and recognition of heads.

Source: Ultralytics `non_max_suppression` with its defaults: the best class of each box, suppression by class.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from graphkiln_backend.graph.dtypes import AnyArray
from graphkiln_backend.graph.errors import ConversionError
from graphkiln_converters.detection.candidates import Candidates, as_corners, taken
from graphkiln_converters.detection.operators import Floats, keep, suppress
from graphkiln_converters.recipe import BoxFormat, Head

# Boxes with a score at or below it are ignored. Clients apply a higher threshold, so this one does not affect them.
LEAST_SCORE = 0.01


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """Settings of the post-processing.

    Attributes:
        head: Kind of the head.
        boxes: Format of the boxes.
        size: `(height, width)` of the input in pixels.
        iou_threshold: Largest intersection over union of two kept boxes of a class.
        max_detections: Maximum number of detections per image.
        least_score: Boxes with a score at or below it are ignored.
        most_of_class: Maximum number of boxes of a class, if the graph limits it.
    """

    head: Head
    boxes: BoxFormat
    size: tuple[int, int]
    iou_threshold: float
    max_detections: int
    least_score: float = LEAST_SCORE
    most_of_class: int | None = None


class _HeadModule(nn.Module):
    """Outputs of a graph -> detections as `Candidates.padded` returns them."""

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        self.settings = settings

    def padded(self, candidates: Candidates) -> dict[str, torch.Tensor]:
        return candidates.filled(self.settings.max_detections).padded(self.settings.max_detections)


class RawHead(_HeadModule):
    """The scored boxes of YOLOv5 and YOLOv8."""

    def forward(self, found: torch.Tensor) -> dict[str, torch.Tensor]:
        """`[batch, 4 + classes, boxes]` or `[batch, boxes, 5 + classes]`."""
        settings, rows = self.settings, found.float()
        if settings.head is Head.YOLOV5:
            scores = rows[..., 5:] * rows[..., 4:5]
        else:
            rows = rows.transpose(1, 2)
            scores = rows[..., 4:]
        best, classes = scores.max(-1)
        corners = corners_of(rows[..., :4], settings.boxes, settings.size)
        candidates = Candidates(corners, best, classes).above(settings.least_score)
        return self.padded(candidates.suppressed(scores.shape[2], settings.iou_threshold))


class EndToEndHead(_HeadModule):
    """Rows that the graph has already selected."""

    def forward(self, found: torch.Tensor) -> dict[str, torch.Tensor]:
        """`[batch, detections, 6]` of box, score and class."""
        settings, rows = self.settings, found.float()
        corners = corners_of(rows[..., :4], settings.boxes, settings.size)
        candidates = Candidates(corners, rows[..., 4], rows[..., 5].round().to(torch.int64))
        return self.padded(candidates.above(settings.least_score))


class SelectedHead(_HeadModule):
    """Inputs of the graph's own NonMaxSuppression, with the thresholds and limits of that node."""

    def forward(self, boxes: torch.Tensor, scores: torch.Tensor) -> dict[str, torch.Tensor]:
        """`[batch, boxes, 4]` and `[batch, classes, boxes]`."""
        settings, scores = self.settings, scores.float()
        corners = corners_of(boxes.float(), settings.boxes, settings.size)
        wanted = torch.where(scores > settings.least_score, scores, 0.0)
        kept = suppress(corners, wanted, settings.iou_threshold)
        count = min(settings.most_of_class or kept.shape[2], kept.shape[2])
        best, order = kept.topk(count, dim=2)  # of each class
        numbers = torch.arange(kept.shape[1]).repeat_interleave(count).expand_as(best.flatten(1))
        return self.padded(Candidates(taken(corners, order.flatten(1)), best.flatten(1), numbers))


def head_of(settings: Settings) -> nn.Module:
    """Return the module of a kind of head."""
    kinds = {Head.END_TO_END: EndToEndHead, Head.SELECTED: SelectedHead}
    return kinds.get(settings.head, RawHead)(settings).eval()


def corners_of(boxes: torch.Tensor, written: BoxFormat, size: tuple[int, int]) -> torch.Tensor:
    """Convert boxes `[..., 4]` of any format to x1, y1, x2, y2 in pixels of an input of `(height, width)`."""
    form, _, unit = written.value.partition("-")
    boxes = boxes[..., [1, 0, 3, 2]] if form == "yxyx" else boxes
    boxes = boxes * torch.tensor((size[1], size[0]) * 2, dtype=boxes.dtype) if unit else boxes
    return as_corners(boxes) if form == "cxcywh" else boxes


# Post-processing of YOLO graphs in NumPy, image by image: the reference of the appended graph.

# Box as x1, y1, x2, y2 in pixels, score, class.
Rows = list[tuple[AnyArray, float, int]]


def detect(found: AnyArray, settings: Settings) -> dict[str, AnyArray]:
    """Compute the outputs of `RawHead` and `EndToEndHead` in NumPy: the reference.

    Source: Ultralytics `non_max_suppression`, with separate classes instead of boxes shifted by class.
    """
    return pad_rows([_rows(each.astype(np.float32), settings) for each in found], settings.max_detections)


def selected(boxes: AnyArray, scores: AnyArray, chosen: Sequence[AnyArray], settings: Settings) -> dict[str, AnyArray]:
    """Compute the outputs of `SelectedHead` from the result of the graph's own NonMaxSuppression.

    Args:
        boxes: `[batch, boxes, 4]`.
        scores: `[batch, classes, boxes]`.
        chosen: For each image `[selected, 3]`: 0, class, box.
        settings: Format of the boxes and their maximum number.
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
    """Pad the detections of each image, best first, as `Candidates.padded`."""
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
        kept = sorted((row for row in found if row[4] > settings.least_score), key=lambda row: -float(row[4]))
        return [(_corners(row[:4], settings), row[4], round(float(row[5]))) for row in kept]
    if settings.head is Head.YOLOV5:
        written, scores = found[:, :4], found[:, 5:] * found[:, 4:5]
    else:
        written, scores = found[:4].T, found[4:].T
    boxes: Floats = np.stack([_corners(box, settings) for box in written])
    return sorted(_suppressed(boxes, scores, settings), key=lambda each: -each[1])


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


# Recognize the kind of a detector by the shapes of its outputs, if only one kind fits.
#
# Sources: Ultralytics YOLOv5 and YOLOv8, "Export" (shapes of the ONNX files); YOLOv10 (rows of six numbers).

# Output -> its shape for one image, with the batch.
Shapes = Mapping[str, tuple[int, ...]]

# Strides of the feature maps: the usual ones, for small objects, and for large images.
_STRIDES = ((8, 16, 32), (4, 8, 16, 32), (8, 16, 32, 64))
# Anchors per cell of YOLOv5.
_ANCHORS = 3
_MOST_ROWS = 1000
_ROW = 6
_BOX = 4
_BOX_AND_OBJECTNESS = 5
_LAYOUTS = {
    Head.YOLOV8: "[batch, 4 + classes, boxes]",
    Head.YOLOV5: "[batch, boxes, 5 + classes]",
    Head.END_TO_END: "[batch, detections, 6]",
    Head.SELECTED: "[selected, 3]",
}
_KINDS_HINT = (
    "choose one: --head yolov8 is [batch, 4 + classes, boxes], yolov5 [batch, boxes, 5 + classes] with boxes in "
    "pixels, end-to-end [batch, detections, 6] as x1, y1, x2, y2, score, class"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Recognized:
    """A head that was recognized.

    Attributes:
        head: Kind of the head.
        output: Name of the output.
        classes: Number of scored classes; 0 if the output has class numbers.
    """

    head: Head
    output: str
    classes: int

    def __str__(self) -> str:
        scored = f", {self.classes} classes" if self.classes else ""
        return f"output '{self.output}' is of the kind {self.head} {_LAYOUTS[self.head]}{scored}"


def recognize(shapes: Shapes, size: tuple[int, int], requested: Head | None) -> Recognized:
    """Recognize the head of a detector by the shapes of its outputs for an image of `(height, width)`.

    Raises:
        ConversionError: No output fits, or several do.
    """
    ranks = {len(dims): name for name, dims in shapes.items()}
    if 4 in ranks and 3 in ranks and 5 not in ranks:  # coefficients of masks would be taken for class scores
        raise ConversionError(
            f"output '{ranks[4]}' {list(shapes[ranks[4]])} holds prototypes of masks: instance segmentation of the "
            "YOLO kind is not supported",
            hint="convert the detector without masks, or wrap it: python:FILE:FACTORY --task detection",
        )
    found = [each for each in _readings(shapes) if _fits(each, shapes[each.output], size, requested)]
    if len(found) == 1:
        return found[0]
    if found:
        problem = f"the outputs fit several kinds: {'; '.join(map(str, found))}"
    else:
        listed = ", ".join(f"{name} {list(dims)}" for name, dims in shapes.items())
        kind = f"the kind {requested}" if requested else "a supported kind"
        problem = f"no output is of {kind}: {listed}, for an image of {size[0]}x{size[1]}"
    raise ConversionError(f"--task detection: {problem}", hint=_KINDS_HINT)


def _readings(shapes: Shapes) -> Iterator[Recognized]:
    """Yield every kind that an output of rank 3 could be."""
    for name, dims in shapes.items():
        if len(dims) == 3:
            if dims[1] > _BOX:
                yield Recognized(head=Head.YOLOV8, output=name, classes=dims[1] - _BOX)
            if dims[2] > _BOX_AND_OBJECTNESS:
                yield Recognized(head=Head.YOLOV5, output=name, classes=dims[2] - _BOX_AND_OBJECTNESS)
            if dims[2] == _ROW:
                yield Recognized(head=Head.END_TO_END, output=name, classes=0)


def _fits(reading: Recognized, dims: Sequence[int], size: tuple[int, int], requested: Head | None) -> bool:
    """Check for the requested kind, or for the number of boxes of a kind."""
    if requested:
        return reading.head is requested
    if reading.head is Head.END_TO_END:
        return dims[1] <= _MOST_ROWS
    cells = [sum((size[0] // stride) * (size[1] // stride) for stride in strides) for strides in _STRIDES]
    return dims[2] in cells if reading.head is Head.YOLOV8 else dims[1] in [_ANCHORS * each for each in cells]
