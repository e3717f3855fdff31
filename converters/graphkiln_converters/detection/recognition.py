"""Which kind of detector a graph is, by the shapes of its outputs: recognized only where no other kind fits.

Sources: Ultralytics YOLOv5 and YOLOv8, "Export" (shapes of the ONNX files); YOLOv10 (rows of six numbers).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from graphkiln_backend.graph.errors import ConversionError
from graphkiln_converters.detection.options import Head

Shapes = Mapping[str, tuple[int, ...]]
"""Output -> its sizes for one image, the batch first."""

_STRIDES = ((8, 16, 32), (4, 8, 16, 32), (8, 16, 32, 64))
"""Of the features that boxes are predicted from: the usual ones, for small objects, and for large images."""
_ANCHORS = 3
"""Of YOLOv5, in each cell of the features."""
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
_SAY = (
    "say which it is: --head yolov8 is [batch, 4 + classes, boxes], yolov5 [batch, boxes, 5 + classes] with boxes in "
    "pixels, end-to-end [batch, detections, 6] as x1, y1, x2, y2, score, class"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Recognized:
    """A head that was recognized.

    Attributes:
        head: Its kind.
        output: The output that holds it.
        classes: How many classes it scores; 0 where it names them by number.
    """

    head: Head
    output: str
    classes: int

    def __str__(self) -> str:
        scored = f", {self.classes} classes" if self.classes else ""
        return f"output '{self.output}' is of the kind {self.head} {_LAYOUTS[self.head]}{scored}"


def recognize(shapes: Shapes, size: tuple[int, int], requested: Head | None) -> Recognized:
    """Finds the head.

    Args:
        shapes: Of all outputs.
        size: `(height, width)` of the image in pixels.
        requested: The kind that the user names, or None.

    Raises:
        ConversionError: No output fits, or several kinds or outputs do.
    """
    _check_only_boxes(shapes)
    found = list(_requested(shapes, requested) if requested else _fitting(shapes, size))
    if len(found) == 1:
        return found[0]
    listed = ", ".join(f"{name} {list(dims)}" for name, dims in shapes.items())
    if found:
        fits = "; ".join(map(str, found))
        raise ConversionError(f"--task detection: it is not clear what the outputs are: {fits}", hint=_SAY)
    what = f"no output is of the kind {requested}" if requested else "no output is of a kind that is known"
    raise ConversionError(f"--task detection: {what}: {listed}, for an image of {size[0]}x{size[1]}", hint=_SAY)


def _check_only_boxes(shapes: Shapes) -> None:
    """Masks come as coefficients among the scores of the boxes, which would be read as classes.

    Raises:
        ConversionError: An output holds prototypes of masks.
    """
    ranks = {len(dims): name for name, dims in shapes.items()}
    if 4 in ranks and 3 in ranks and 5 not in ranks:
        raise ConversionError(
            f"output '{ranks[4]}' {list(shapes[ranks[4]])} holds prototypes of masks: instance segmentation of the "
            "YOLO kind is not supported",
            hint="convert the detector without masks, or wrap it: python:FILE:FACTORY --task detection",
        )


def _fitting(shapes: Shapes, size: tuple[int, int]) -> Iterator[Recognized]:
    cells = [sum((size[0] // stride) * (size[1] // stride) for stride in strides) for strides in _STRIDES]
    for found in (each for head in _CLASSES for each in _requested(shapes, head)):
        if _has_boxes(found.head, shapes[found.output], cells):
            yield found


def _has_boxes(head: Head, dims: Sequence[int], cells: Sequence[int]) -> bool:
    """Whether there are as many boxes as a kind has."""
    if head is Head.END_TO_END:
        return dims[1] <= _MOST_ROWS
    return dims[2] in cells if head is Head.YOLOV8 else dims[1] in [_ANCHORS * each for each in cells]


def _requested(shapes: Shapes, head: Head) -> Iterator[Recognized]:
    for name, dims in _of_rank_3(shapes):
        classes = _CLASSES[head](dims) if head in _CLASSES else None
        if classes is not None:
            yield Recognized(head=head, output=name, classes=classes)


def _classes_v8(dims: Sequence[int]) -> int | None:
    return dims[1] - _BOX if dims[1] > _BOX else None


def _classes_v5(dims: Sequence[int]) -> int | None:
    return dims[2] - _BOX_AND_OBJECTNESS if dims[2] > _BOX_AND_OBJECTNESS else None


def _classes_of_rows(dims: Sequence[int]) -> int | None:
    return 0 if dims[2] == _ROW else None


_CLASSES: Mapping[Head, Callable[[Sequence[int]], int | None]] = {
    Head.YOLOV8: _classes_v8,
    Head.YOLOV5: _classes_v5,
    Head.END_TO_END: _classes_of_rows,
}
"""Kind -> how many classes an output of some sizes holds; 0 where they are numbers, None for another kind."""


def _of_rank_3(shapes: Shapes) -> list[tuple[str, Sequence[int]]]:
    return [(name, dims) for name, dims in shapes.items() if len(dims) == 3]
