"""torchvision's own pipeline behind the resize, for batches of one image size: the reference of a detector's graph."""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import nn

from graphkiln_converters.detection.keypoints import merge_scores
from graphkiln_converters.detection.regions import pool_by_library
from graphkiln_converters.detection.suppression import keep
from graphkiln_converters.torch_libraries import import_torchvision


class LibraryPipeline(nn.Module):
    """Runs a detector of torchvision as it is, image by image, and pads what it finds."""

    def __init__(self, model: Any, count: int) -> None:
        """Takes a model over: its resize and its normalization are left out.

        Args:
            model: The detector.
            count: Most detections of an image.
        """
        super().__init__()
        _complete_torchvision()
        model.transform = _AsItIs()
        self.model = model
        self.count = count

    def forward(self, image: torch.Tensor) -> dict[str, torch.Tensor]:
        """`[batch, 3, height, width]`, normalized -> what the graph returns for it."""
        return pad_found(self.model(list(image)), self.count)


class _AsItIs(nn.Module):
    """In the place of `GeneralizedRCNNTransform`, for images that were resized and normalized."""

    def forward(self, images: list[torch.Tensor], targets: None = None) -> Any:
        from torchvision.models.detection.image_list import ImageList

        return ImageList(torch.stack(images), [tuple(each.shape[-2:]) for each in images]), targets

    def postprocess(self, found: Any, *_sizes: Any) -> Any:
        """Boxes and keypoints stay in pixels of the input, masks in their boxes."""
        return found


def pad_found(found: list[dict[str, torch.Tensor]], count: int) -> dict[str, torch.Tensor]:
    """Detections of each image, as `torchvision` and `transformers` return them, as one batch.

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
    """Puts a suppression of our own where torchvision's compiled operators are built for another PyTorch."""
    torchvision = import_torchvision()
    if not torchvision.extension._has_ops():  # noqa: SLF001 - torchvision's own question
        torchvision.ops.boxes.nms = _nms
        poolers: Any = importlib.import_module("torchvision.ops.poolers")
        poolers.roi_align = pool_by_library


def _nms(boxes: torch.Tensor, scores: torch.Tensor, iou_threshold: float) -> torch.Tensor:
    return torch.from_numpy(keep(boxes.detach().float().numpy(), scores.detach().float().numpy(), iou_threshold))
