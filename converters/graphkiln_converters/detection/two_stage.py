"""torchvision's Faster, Mask and Keypoint R-CNN with both of their stages for whole batches of one image size."""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import nn

from graphkiln_converters.detection.candidates import Candidates, clipped, suppressed_by_group, taken
from graphkiln_converters.detection.keypoints import locate
from graphkiln_converters.detection.one_stage import anchors_of
from graphkiln_converters.detection.regions import pool
from graphkiln_converters.detection.suppression import suppress

_LEAST_SIDE = 1e-2
"""In pixels. Source: `RoIHeads.postprocess_detections`."""


class RegionPool(nn.Module):
    """Features of boxes, each from the level of the pyramid that its size belongs to.

    Source: `torchvision.ops.MultiScaleRoIAlign`.
    """

    def __init__(self, pooler: Any, features: dict[str, torch.Tensor], size: tuple[int, int]) -> None:
        """Takes what a pooler works out from the first image.

        Args:
            pooler: Of a model.
            features: Of images of the size.
            size: `(height, width)` of the input in pixels.
        """
        super().__init__()
        self.names = [name for name in features if name in pooler.featmap_names]
        poolers = importlib.import_module("torchvision.ops.poolers")
        self.scales, self.levels = poolers._setup_scales(  # noqa: SLF001 - as its forward does
            [features[name] for name in self.names], [size], pooler.canonical_scale, pooler.canonical_level
        )
        self.side, self.samples = int(pooler.output_size[0]), int(pooler.sampling_ratio)

    def forward(self, features: dict[str, torch.Tensor], boxes: torch.Tensor) -> torch.Tensor:
        """Boxes `[batch, boxes, 4]` -> `[batch * boxes, channels, side, side]`."""
        images = torch.arange(boxes.shape[0]).reshape(-1, 1, 1).expand(-1, boxes.shape[1], 1)
        flat, regions = boxes.flatten(0, 1), torch.cat((images.to(boxes.dtype), boxes), 2).flatten(0, 1)
        pooled = [
            pool(features[name], regions, scale, self.side, self.samples)
            for name, scale in zip(self.names, self.scales, strict=True)
        ]
        return pooled[0] if len(pooled) == 1 else self._merged(pooled, flat)

    def _merged(self, pooled: list[torch.Tensor], boxes: torch.Tensor) -> torch.Tensor:
        levels = self.levels([boxes]).reshape(-1, 1, 1, 1)
        merged = pooled[0]
        for level, found in enumerate(pooled):
            merged = torch.where(levels == level, found, merged)
        return merged


class TwoStage(nn.Module):
    """Proposals, then classes and boxes of each; then masks or keypoints of what is detected."""

    anchors: torch.Tensor

    def __init__(self, model: Any, size: tuple[int, int]) -> None:
        """Takes a model over.

        Args:
            model: A `FasterRCNN`, `MaskRCNN` or `KeypointRCNN`.
            size: `(height, width)` of the input in pixels.
        """
        super().__init__()
        self.model, self.size = model, size
        with torch.no_grad():
            features = model.backbone(torch.zeros(1, 3, *size))
            maps = list(features.values())
            anchors = anchors_of(model.rpn, maps, size)
            self.counts = [each.flatten(1).shape[1] for each in model.rpn.head(maps)[0]]
        self.register_buffer("anchors", anchors.detach().clone(), persistent=False)
        heads = model.roi_heads
        self.box_pool = RegionPool(heads.box_roi_pool, features, size)
        self.mask_pool = RegionPool(heads.mask_roi_pool, features, size) if heads.has_mask() else None
        self.point_pool = RegionPool(heads.keypoint_roi_pool, features, size) if heads.has_keypoint() else None

    def forward(self, image: torch.Tensor) -> dict[str, torch.Tensor]:
        """`[batch, 3, height, width]`, normalized -> see `Candidates.padded`; `masks` and `keypoints`."""
        features = self.model.backbone(image)
        found = self._detected(features, self._proposals(list(features.values())))
        if self.mask_pool:
            found["masks"] = self._masks(features, found)
        if self.point_pool:
            found["keypoints"] = self._keypoints(features, found)
        return found

    def _proposals(self, features: list[torch.Tensor]) -> Candidates:
        """Source: `RegionProposalNetwork.filter_proposals`."""
        rpn = self.model.rpn
        layers = importlib.import_module("torchvision.models.detection.rpn").concat_box_prediction_layers
        objectness, deltas = layers(*rpn.head(features))
        total = self.anchors.shape[0]
        parts = (
            objectness.reshape(-1, total).split(self.counts, 1),
            deltas.reshape(-1, total, 4).split(self.counts, 1),
            torch.split(self.anchors, self.counts),
        )
        found = Candidates.joined([self._of_level(*level) for level in zip(*parts, strict=True)])
        return found.best(rpn.post_nms_top_n())

    def _of_level(self, objectness: torch.Tensor, deltas: torch.Tensor, anchors: torch.Tensor) -> Candidates:
        rpn = self.model.rpn
        best, order = objectness.topk(min(rpn.pre_nms_top_n(), objectness.shape[1]), dim=1)
        boxes = clipped(_decoded(rpn.box_coder, taken(deltas, order), anchors[order]).squeeze(2), *self.size)
        scores = best.sigmoid()
        wanted = _are_large(boxes, rpn.min_size) & (scores >= rpn.score_thresh)
        kept = suppress(boxes, torch.where(wanted, scores, 0.0).unsqueeze(1), rpn.nms_thresh).squeeze(1)
        return Candidates(boxes, kept, torch.zeros_like(order))

    def _detected(self, features: dict[str, torch.Tensor], proposals: Candidates) -> dict[str, torch.Tensor]:
        """Source: `RoIHeads.postprocess_detections`."""
        heads, count = self.model.roi_heads, proposals.boxes.shape[1]
        logits, deltas = heads.box_predictor(heads.box_head(self.box_pool(features, proposals.boxes)))
        classes = logits.shape[1]
        boxes = _decoded(heads.box_coder, deltas.reshape(-1, count, classes * 4), proposals.boxes)
        boxes = clipped(boxes, *self.size)[:, :, 1:].transpose(1, 2)
        scores = logits.softmax(-1).reshape(-1, count, classes)[..., 1:].transpose(1, 2)
        wanted = (scores > heads.score_thresh) & _are_large(boxes, _LEAST_SIDE) & (proposals.scores > 0).unsqueeze(1)
        found = suppressed_by_group(boxes, torch.where(wanted, scores, 0.0), heads.nms_thresh, first=1)
        return found.filled(heads.detections_per_img).padded(heads.detections_per_img)

    def _masks(self, features: dict[str, torch.Tensor], found: dict[str, torch.Tensor]) -> torch.Tensor:
        """`[batch, detections, height, width]`: probabilities in the boxes. Source: `maskrcnn_inference`."""
        assert self.mask_pool is not None  # noqa: S101 - for mypy
        heads = self.model.roi_heads
        masks = heads.mask_predictor(heads.mask_head(self.mask_pool(features, found["boxes"]))).sigmoid()
        classes = found["classes"].reshape(-1, 1, 1, 1).expand(-1, 1, *masks.shape[2:])
        chosen = masks.gather(1, classes).reshape(*found["classes"].shape, *masks.shape[2:])
        return torch.where((found["scores"] > 0).unsqueeze(-1).unsqueeze(-1), chosen, 0.0)

    def _keypoints(self, features: dict[str, torch.Tensor], found: dict[str, torch.Tensor]) -> torch.Tensor:
        """`[batch, detections, keypoints, 3]`: x, y in pixels, score. Source: `keypointrcnn_inference`."""
        assert self.point_pool is not None  # noqa: S101 - for mypy
        heads = self.model.roi_heads
        heatmaps = heads.keypoint_predictor(heads.keypoint_head(self.point_pool(features, found["boxes"])))
        points = locate(heatmaps, found["boxes"].flatten(0, 1))
        points = points.reshape(*found["classes"].shape, *points.shape[1:])
        return torch.where((found["scores"] > 0).unsqueeze(-1).unsqueeze(-1), points, 0.0)


def _decoded(coder: Any, deltas: torch.Tensor, boxes: torch.Tensor) -> torch.Tensor:
    """Boxes `[batch, boxes, 4]` moved by deltas `[batch, boxes, classes * 4]`: `[batch, boxes, classes, 4]`."""
    count, classes = boxes.shape[1], deltas.shape[2] // 4
    moved: torch.Tensor = coder.decode_single(deltas.flatten(0, 1), boxes.flatten(0, 1))
    return moved.reshape(-1, count, classes, 4)


def _are_large(boxes: torch.Tensor, least: float) -> torch.Tensor:
    sides = boxes[..., 2:] - boxes[..., :2]
    return (sides >= least).all(-1)
