"""What graphs of the YOLO kind leave to their users, as PyTorch that exports with a batch.

Source: Ultralytics `non_max_suppression` with its defaults: the best class of each box, suppression by class.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from graphkiln_converters.detection.candidates import Candidates, as_corners, taken
from graphkiln_converters.detection.options import BoxFormat, Head
from graphkiln_converters.detection.suppression import suppress

LEAST_SCORE = 0.01
"""Boxes at or below it are no candidates; clients choose by a score of their own, and find the same with or without."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """What is done with the boxes.

    Attributes:
        head: Kind of the output.
        boxes: Format of its boxes.
        size: `(height, width)` of the input in pixels.
        iou_threshold: Most that two boxes of a class which are kept may overlap.
        max_detections: Most detections of an image.
        least_score: Boxes at or below it are no candidates.
        most_of_class: Most boxes of a class, where a graph limits them.
    """

    head: Head
    boxes: BoxFormat
    size: tuple[int, int]
    iou_threshold: float
    max_detections: int
    least_score: float = LEAST_SCORE
    most_of_class: int | None = None


class RawHead(nn.Module):
    """From the scored boxes of YOLOv5 and YOLOv8 to detections."""

    def __init__(self, settings: Settings) -> None:
        """Takes the settings of a graph."""
        super().__init__()
        self.settings = settings

    def forward(self, found: torch.Tensor) -> dict[str, torch.Tensor]:
        """`[batch, 4 + classes, boxes]` or `[batch, boxes, 5 + classes]` -> see `Candidates.padded`."""
        settings, rows = self.settings, found.float()
        if settings.head is Head.YOLOV5:
            scores = rows[..., 5:] * rows[..., 4:5]
        else:
            rows = rows.transpose(1, 2)
            scores = rows[..., 4:]
        best, classes = scores.max(-1)
        corners = corners_of(rows[..., :4], settings.boxes, settings.size)
        candidates = Candidates(corners, best, classes).above(settings.least_score)
        kept = candidates.suppressed(scores.shape[2], settings.iou_threshold)
        return kept.filled(settings.max_detections).padded(settings.max_detections)


class EndToEndHead(nn.Module):
    """From rows that a graph chose itself to detections."""

    def __init__(self, settings: Settings) -> None:
        """Takes the settings of a graph."""
        super().__init__()
        self.settings = settings

    def forward(self, found: torch.Tensor) -> dict[str, torch.Tensor]:
        """`[batch, detections, 6]` of box, score and class -> see `Candidates.padded`."""
        settings, rows = self.settings, found.float()
        corners = corners_of(rows[..., :4], settings.boxes, settings.size)
        candidates = Candidates(corners, rows[..., 4], rows[..., 5].round().to(torch.int64))
        return candidates.above(settings.least_score).filled(settings.max_detections).padded(settings.max_detections)


class SelectedHead(nn.Module):
    """From the boxes and scores that a NonMaxSuppression of a graph takes to detections."""

    def __init__(self, settings: Settings) -> None:
        """Takes the settings of a graph: thresholds and limits are those of its node."""
        super().__init__()
        self.settings = settings

    def forward(self, boxes: torch.Tensor, scores: torch.Tensor) -> dict[str, torch.Tensor]:
        """`[batch, boxes, 4]` and `[batch, classes, boxes]` -> see `Candidates.padded`."""
        settings, scores = self.settings, scores.float()
        corners = corners_of(boxes.float(), settings.boxes, settings.size)
        wanted = torch.where(scores > settings.least_score, scores, 0.0)
        candidates = self._chosen(corners, suppress(corners, wanted, settings.iou_threshold))
        return candidates.filled(settings.max_detections).padded(settings.max_detections)

    def _chosen(self, corners: torch.Tensor, kept: torch.Tensor) -> Candidates:
        """The best of each class."""
        count = min(self.settings.most_of_class or kept.shape[2], kept.shape[2])
        best, order = kept.topk(count, dim=2)
        numbers = torch.arange(kept.shape[1]).repeat_interleave(count).expand_as(best.flatten(1))
        return Candidates(taken(corners, order.flatten(1)), best.flatten(1), numbers)


def head_of(settings: Settings) -> nn.Module:
    """The module of a kind."""
    kinds = {Head.END_TO_END: EndToEndHead, Head.SELECTED: SelectedHead}
    return kinds.get(settings.head, RawHead)(settings).eval()


def corners_of(boxes: torch.Tensor, written: BoxFormat, size: tuple[int, int]) -> torch.Tensor:
    """Boxes `[..., 4]` of any format as x1, y1, x2, y2 in pixels of an input of `(height, width)`."""
    form, _, unit = written.value.partition("-")
    boxes = boxes[..., [1, 0, 3, 2]] if form == "yxyx" else boxes
    boxes = boxes * torch.tensor((size[1], size[0]) * 2, dtype=boxes.dtype) if unit else boxes
    return as_corners(boxes) if form == "cxcywh" else boxes
