"""torchvision's SSD, RetinaNet and FCOS with their post-processing for whole batches of one image size."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from graphkiln_converters.detection.candidates import Candidates, clipped, suppressed_by_group, taken


def anchors_of(model: Any, features: list[torch.Tensor], size: tuple[int, int]) -> torch.Tensor:
    """The anchors of every image of a size, `[anchors, 4]` as x1, y1, x2, y2 in pixels.

    Args:
        model: Holds an anchor generator.
        features: Feature maps of images of that size.
        size: `(height, width)`.
    """
    from torchvision.models.detection.image_list import ImageList

    found: torch.Tensor = model.anchor_generator(ImageList(torch.zeros(1, 3, *size), [size]), features)[0]
    return found


def decoded(coder: Any, deltas: torch.Tensor, anchors: torch.Tensor) -> torch.Tensor:
    """Boxes of anchors that are moved by deltas: `[batch, anchors, 4]` twice, to the same."""
    if hasattr(coder, "decode_single"):
        flat: torch.Tensor = coder.decode_single(deltas.flatten(0, 1), anchors.flatten(0, 1))
        return flat.reshape(-1, anchors.shape[1], 4)
    return torch.as_tensor(coder.decode(deltas, anchors))


class _OneStage(nn.Module):
    """Backbone, heads and anchors for one image size."""

    anchors: torch.Tensor

    def __init__(self, model: Any, size: tuple[int, int]) -> None:
        super().__init__()
        self.model = model
        self.size = size
        with torch.no_grad():
            features = list(model.backbone(torch.zeros(1, 3, *size)).values())
            anchors = anchors_of(model, features, size)
        self.register_buffer("anchors", anchors.detach().clone(), persistent=False)
        self.cells = [each.shape[-2] * each.shape[-1] for each in features]

    def heads(self, image: torch.Tensor) -> dict[str, torch.Tensor]:
        """What the heads return, all levels in a row: `[batch, anchors, ...]` by torchvision's names."""
        found: dict[str, torch.Tensor] = self.model.head(list(self.model.backbone(image).values()))
        return found


class Ssd(_OneStage):
    """SSD and SSDlite: the best of each class, then suppression.

    Source: `torchvision.models.detection.SSD.postprocess_detections`.
    """

    def forward(self, image: torch.Tensor) -> dict[str, torch.Tensor]:
        """`[batch, 3, height, width]`, normalized -> see `Candidates.padded`."""
        model, heads = self.model, self.heads(image)
        deltas = heads["bbox_regression"]
        boxes = clipped(decoded(model.box_coder, deltas, self.anchors.expand_as(deltas)), *self.size)
        scores = heads["cls_logits"].softmax(-1)[..., 1:].transpose(1, 2)
        scores = torch.where(scores > model.score_thresh, scores, 0.0)
        count, classes = min(model.topk_candidates, boxes.shape[1]), scores.shape[1]
        best, order = scores.topk(count, dim=2)
        by_class = taken(boxes, order.flatten(1)).reshape(-1, classes, count, 4)
        return suppressed_by_group(by_class, best, model.nms_thresh, first=1).padded(model.detections_per_img)


class ByLevel(_OneStage):
    """RetinaNet and FCOS: the best of each level of the pyramid, then suppression.

    Source: `postprocess_detections` of `torchvision.models.detection.RetinaNet` and `FCOS`.
    """

    def forward(self, image: torch.Tensor) -> dict[str, torch.Tensor]:
        """`[batch, 3, height, width]`, normalized -> see `Candidates.padded`."""
        model, heads = self.model, self.heads(image)
        scores, deltas = self._scores(heads), heads["bbox_regression"]
        each = self.anchors.shape[0] // sum(self.cells)
        sizes = [count * each for count in self.cells]
        parts = torch.split(scores, sizes, 1), torch.split(deltas, sizes, 1), torch.split(self.anchors, sizes)
        levels = zip(*parts, strict=True)
        found = Candidates.joined([self._best_of_level(*level) for level in levels])
        return found.suppressed(scores.shape[2], model.nms_thresh).padded(model.detections_per_img)

    def _scores(self, heads: dict[str, torch.Tensor]) -> torch.Tensor:
        scores = heads["cls_logits"].sigmoid()
        if "bbox_ctrness" not in heads:
            return scores
        return torch.sqrt(scores * heads["bbox_ctrness"].sigmoid())

    def _best_of_level(self, scores: torch.Tensor, deltas: torch.Tensor, anchors: torch.Tensor) -> Candidates:
        classes = scores.shape[2]
        flat = torch.where(scores > self.model.score_thresh, scores, 0.0).flatten(1)
        best, order = flat.topk(min(self.model.topk_candidates, flat.shape[1]), dim=1)
        rows = order // classes
        boxes = decoded(self.model.box_coder, taken(deltas, rows), anchors[rows])
        return Candidates(clipped(boxes, *self.size), best, order % classes)
