"""Options of a user for a detector's graph that the graph does not declare itself."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Head(StrEnum):
    """Kind of output of a detector's graph; `convert` recognizes it by the shapes of the outputs."""

    YOLOV8 = "yolov8"
    YOLOV5 = "yolov5"
    END_TO_END = "end-to-end"
    SELECTED = "selected"


class BoxFormat(StrEnum):
    """Meaning of the four numbers of a box; `unit` ones are shares of the input, from 0 to 1, others are pixels."""

    CORNERS = "xyxy"
    ROWS_FIRST = "yxyx"
    CENTER = "cxcywh"
    UNIT_CORNERS = "xyxy-unit"
    UNIT_ROWS_FIRST = "yxyx-unit"
    UNIT_CENTER = "cxcywh-unit"


@dataclass(frozen=True, kw_only=True, slots=True)
class DetectorOptions:
    """Options of a detector without post-processing.

    Attributes:
        head: Its kind, or None to recognize it.
        boxes: Format of its boxes, or None for that of its kind.
        iou_threshold: Most that two boxes of a class which are kept may overlap, or None for the usual one.
        max_detections: Most detections of an image, or None for the usual number.
    """

    head: Head | None = None
    boxes: BoxFormat | None = None
    iou_threshold: float | None = None
    max_detections: int | None = None

    @property
    def given(self) -> tuple[str, ...]:
        """The flags of `convert` that were given."""
        flags = {
            "--head": self.head,
            "--boxes": self.boxes,
            "--iou-threshold": self.iou_threshold,
            "--max-detections": self.max_detections,
        }
        return tuple(flag for flag, value in flags.items() if value is not None)
