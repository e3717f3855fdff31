"""Candidate boxes of a detector: ranking, non-maximum suppression, and padding to a fixed number per image."""

from __future__ import annotations

from typing import NamedTuple

import torch

from graphkiln_backend.graph.task import Detection
from graphkiln_converters.detection.operators import suppress

# Outputs of a detector's graph before renaming.
OUTPUTS = ("boxes", "scores", "classes", "counts")
# The task that reads them.
DETECTION = Detection(boxes="boxes", scores="scores", classes="classes", counts="counts")


class Candidates(NamedTuple):
    """Candidates of a batch.

    Attributes:
        boxes: FP32 `[batch, candidates, 4]` as x1, y1, x2, y2 in pixels of the input.
        scores: FP32 `[batch, candidates]`; 0 where there is no candidate.
        classes: INT64 `[batch, candidates]`.
    """

    boxes: torch.Tensor
    scores: torch.Tensor
    classes: torch.Tensor

    @classmethod
    def joined(cls, parts: list[Candidates]) -> Candidates:
        """Concatenate candidates."""
        boxes, scores, classes = zip(*parts, strict=True)
        return cls(torch.cat(boxes, 1), torch.cat(scores, 1), torch.cat(classes, 1))

    def above(self, threshold: float) -> Candidates:
        """Keep candidates with a higher score."""
        return self._replace(scores=torch.where(self.scores > threshold, self.scores, 0.0))

    def best(self, count: int) -> Candidates:
        """Keep the best candidates by falling score; all if there are fewer."""
        scores, order = self.scores.topk(min(count, self.scores.shape[1]), dim=1)
        return Candidates(taken(self.boxes, order), scores, self.classes.gather(1, order))

    def suppressed(self, classes: int, iou_threshold: float) -> Candidates:
        """Apply non-maximum suppression within each class; boxes that overlap more than the threshold are removed."""
        numbers = torch.arange(classes).reshape(1, -1, 1)
        by_class = torch.where(self.classes.unsqueeze(1) == numbers, self.scores.unsqueeze(1), 0.0)
        return self._replace(scores=suppress(self.boxes, by_class, iou_threshold).amax(1))

    def filled(self, count: int) -> Candidates:
        """Pad with empty candidates to a number."""
        lacking, pad = max(0, count - self.scores.shape[1]), torch.nn.functional.pad
        boxes, scores, classes = self
        return Candidates(pad(boxes, (0, 0, 0, lacking)), pad(scores, (0, lacking)), pad(classes, (0, lacking)))

    def padded(self, count: int) -> dict[str, torch.Tensor]:
        """Return the best candidates as outputs of a graph: by falling score, padded with zeros.

        Returns:
            `boxes` FP32 `[batch, detections, 4]`, `scores` FP32 `[batch, detections]`, `classes` INT64
            `[batch, detections]`, `counts` INT32 `[batch]`.
        """
        boxes, scores, classes = self.best(count)
        valid = scores > 0
        return {
            "boxes": torch.where(valid.unsqueeze(-1), boxes, 0.0),
            "scores": torch.where(valid, scores, 0.0),
            "classes": torch.where(valid, classes, 0),
            "counts": valid.sum(1).to(torch.int32),
        }


def best_of_all_classes(boxes: torch.Tensor, scores: torch.Tensor, count: int) -> Candidates:
    """Find the best pairs of a box and a class.

    Args:
        boxes: `[batch, boxes, 4]`.
        scores: `[batch, boxes, classes]`.
        count: Number of pairs; all if there are fewer.
    """
    classes = scores.shape[2]
    best, order = scores.flatten(1).topk(min(count, scores.shape[1] * classes), dim=1)
    return Candidates(taken(boxes, order // classes), best, order % classes)


def taken(rows: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    """Gather rows of `[batch, rows, values]` at indices `[batch, taken]`: `[batch, taken, values]`."""
    return rows.gather(1, indices.unsqueeze(-1).expand(-1, -1, rows.shape[2]))


def as_corners(boxes: torch.Tensor) -> torch.Tensor:
    """Convert boxes `[..., 4]` from center x, center y, width, height to x1, y1, x2, y2."""
    center, half = boxes[..., :2], boxes[..., 2:] / 2
    return torch.cat((center - half, center + half), -1)


def clipped(boxes: torch.Tensor, height: int, width: int) -> torch.Tensor:
    """Clip boxes `[..., 4]` to the image."""
    return torch.minimum(boxes.clamp(min=0), torch.tensor([width, height, width, height], dtype=boxes.dtype))


def suppressed_by_group(boxes: torch.Tensor, scores: torch.Tensor, iou_threshold: float, *, first: int) -> Candidates:
    """Apply non-maximum suppression where each class has its own boxes.

    Args:
        boxes: `[batch, classes, candidates, 4]`.
        scores: `[batch, classes, candidates]`; only positive scores are candidates.
        iou_threshold: Largest intersection over union of two kept boxes of a class.
        first: Number of the first class.
    """
    classes, count = scores.shape[1:]
    kept = suppress(boxes.flatten(0, 1), scores.flatten(0, 1).unsqueeze(1), iou_threshold)
    numbers = torch.arange(first, first + classes).repeat_interleave(count)
    flat = kept.reshape(-1, classes * count)
    return Candidates(boxes.flatten(1, 2), flat, numbers.expand_as(flat))
