"""torchvision's detectors with post-processing for batches of one image size: one-stage, two-stage, reference."""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import nn

from graphkiln_converters.detection.candidates import Candidates, clipped, suppressed_by_group, taken
from graphkiln_converters.detection.operators import keep, locate, merge_scores, pool, pool_by_library, suppress
from graphkiln_converters.torch_libraries import import_torchvision


def anchors_of(model: Any, features: list[torch.Tensor], size: tuple[int, int]) -> torch.Tensor:
    """Compute the anchors for images of `(height, width)`: `[anchors, 4]` as x1, y1, x2, y2 in pixels."""
    from torchvision.models.detection.image_list import ImageList

    found: torch.Tensor = model.anchor_generator(ImageList(torch.zeros(1, 3, *size), [size]), features)[0]
    return found


def decoded(coder: Any, deltas: torch.Tensor, anchors: torch.Tensor) -> torch.Tensor:
    """Decode box deltas `[batch, anchors, 4]` relative to anchors of the same shape."""
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
        """Outputs of the heads, levels concatenated: `[batch, anchors, ...]` by torchvision's names."""
        found: dict[str, torch.Tensor] = self.model.head(list(self.model.backbone(image).values()))
        return found


class Ssd(_OneStage):
    """SSD and SSDlite: top-k per class, then suppression.

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
    """RetinaNet and FCOS: top-k per pyramid level, then suppression.

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


# torchvision's Faster, Mask and Keypoint R-CNN with both stages for batches of one image size.

# In pixels. Source: `RoIHeads.postprocess_detections`.
_LEAST_SIDE = 1e-2


class RegionPool(nn.Module):
    """Features of boxes, each from the pyramid level for its size.

    Source: `torchvision.ops.MultiScaleRoIAlign`.
    """

    def __init__(self, pooler: Any, features: dict[str, torch.Tensor], size: tuple[int, int]) -> None:
        """Precompute what a pooler derives from the first image."""
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
    """Proposals, then classes and boxes, then masks or keypoints of the detections."""

    anchors: torch.Tensor

    def __init__(self, model: Any, size: tuple[int, int]) -> None:
        """Wrap a model."""
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
    """Decode deltas `[batch, boxes, classes * 4]` of boxes `[batch, boxes, 4]` into `[batch, boxes, classes, 4]`."""
    count, classes = boxes.shape[1], deltas.shape[2] // 4
    moved: torch.Tensor = coder.decode_single(deltas.flatten(0, 1), boxes.flatten(0, 1))
    return moved.reshape(-1, count, classes, 4)


def _are_large(boxes: torch.Tensor, least: float) -> torch.Tensor:
    sides = boxes[..., 2:] - boxes[..., :2]
    return (sides >= least).all(-1)


# torchvision's own pipeline after the resize, for batches of one image size: the reference of a detector's graph.


class LibraryPipeline(nn.Module):
    """Run an unchanged torchvision detector image by image, and pad its detections."""

    def __init__(self, model: Any, count: int) -> None:
        """Wrap a model without its resize and normalization."""
        super().__init__()
        _complete_torchvision()
        model.transform = _AsItIs()
        self.model = model
        self.count = count

    def forward(self, image: torch.Tensor) -> dict[str, torch.Tensor]:
        """`[batch, 3, height, width]`, normalized -> outputs as of the graph."""
        return pad_found(self.model(list(image)), self.count)


class _AsItIs(nn.Module):
    """Replace `GeneralizedRCNNTransform`: images are already resized and normalized."""

    def forward(self, images: list[torch.Tensor], targets: None = None) -> Any:
        from torchvision.models.detection.image_list import ImageList

        return ImageList(torch.stack(images), [tuple(each.shape[-2:]) for each in images]), targets

    def postprocess(self, found: Any, *_sizes: Any) -> Any:
        """Keep boxes and keypoints in pixels of the input, and masks relative to their boxes."""
        return found


def pad_found(found: list[dict[str, torch.Tensor]], count: int) -> dict[str, torch.Tensor]:
    """Pad the detections of each image, as `torchvision` and `transformers` return them, into one batch.

    Args:
        found: For each image `boxes` `[n, 4]`, `scores` `[n]`, `labels` `[n]`; maybe `masks` `[n, 1, h, w]`,
            or `keypoints` `[n, k, 3]` and `keypoints_scores` `[n, k]`.
        count: Rows of the batch.

    Returns:
        See `Candidates.padded`; `masks` `[batch, count, h, w]`, `keypoints` `[batch, count, k, 3]`.
    """
    ranked = [
        {key: value[each["scores"].argsort(descending=True, stable=True)] for key, value in each.items()}
        for each in found
    ]
    padded = {
        "boxes": torch.stack([_pad(each["boxes"], count) for each in ranked]),
        "scores": torch.stack([_pad(each["scores"], count) for each in ranked]),
        "classes": torch.stack([_pad(each["labels"].to(torch.int64), count) for each in ranked]),
        "counts": torch.tensor([min(count, len(each["scores"])) for each in ranked], dtype=torch.int32),
    }
    if "masks" in ranked[0]:
        padded["masks"] = torch.stack([_pad(each["masks"].squeeze(1), count) for each in ranked])
    if "keypoints" in ranked[0]:
        points = [merge_scores(each["keypoints"], each["keypoints_scores"]) for each in ranked]
        padded["keypoints"] = torch.stack([_pad(each, count) for each in points])
    return padded


def _pad(rows: torch.Tensor, count: int) -> torch.Tensor:
    rows = rows[:count]
    return torch.cat((rows, rows.new_zeros((count - len(rows), *rows.shape[1:]))))


def _complete_torchvision() -> None:
    """Replace torchvision's suppression if it was built for another PyTorch."""
    torchvision = import_torchvision()
    if not torchvision.extension._has_ops():  # noqa: SLF001 - torchvision's own question
        torchvision.ops.boxes.nms = _nms
        poolers: Any = importlib.import_module("torchvision.ops.poolers")
        poolers.roi_align = pool_by_library


def _nms(boxes: torch.Tensor, scores: torch.Tensor, iou_threshold: float) -> torch.Tensor:
    return torch.from_numpy(keep(boxes.detach().float().numpy(), scores.detach().float().numpy(), iou_threshold))
