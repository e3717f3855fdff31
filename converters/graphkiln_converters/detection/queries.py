"""Post-processing of transformers' query-based detectors and segmenters, for batches."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from graphkiln_converters.detection.candidates import Candidates, best_of_all_classes
from graphkiln_converters.detection.torchvision import pad_found
from graphkiln_converters.detection.yolo import LEAST_SCORE, corners_of
from graphkiln_converters.recipe import BoxFormat

# Source: `top_k` of `ConditionalDetrImageProcessor.post_process_object_detection`.
_MOST = 100


class QueryDetector(nn.Module):
    """DETR-like models: each query is a box with class scores.

    Attributes:
        model: Model of transformers.
        size: `(height, width)` of its input in pixels.
        focal: Whether classes have independent probabilities (sigmoid); else softmax with a "nothing" class.
        most: Maximum number of detections per image.

    Source: `post_process_object_detection` of `DetrImageProcessor`, `ConditionalDetrImageProcessor` and
    `RTDetrImageProcessor`.
    """

    def __init__(self, model: Any, size: tuple[int, int], *, focal: bool, most: int) -> None:
        """Wrap a model."""
        super().__init__()
        self.model, self.size, self.focal, self.most = model, size, focal, most

    def forward(self, pixel_values: torch.Tensor) -> dict[str, torch.Tensor]:
        """`[batch, 3, height, width]` -> see `Candidates.padded`."""
        found = self.model(pixel_values=pixel_values, return_dict=True)
        boxes = corners_of(found["pred_boxes"], BoxFormat.UNIT_CENTER, self.size)
        return self._candidates(boxes, found["logits"]).above(LEAST_SCORE).padded(self.most)

    def _candidates(self, boxes: torch.Tensor, logits: torch.Tensor) -> Candidates:
        if self.focal:
            return best_of_all_classes(boxes, logits.sigmoid(), self.most)
        return Candidates(boxes, *logits.softmax(-1)[..., :-1].max(-1))


class QueryLibrary(nn.Module):
    """The reference: the same model with its own processor, image by image.

    Attributes:
        model: Model of transformers.
        processor: Its image processor.
        size: `(height, width)` of its input in pixels.
        most: Maximum number of detections per image.
    """

    def __init__(self, model: Any, processor: Any, size: tuple[int, int], most: int) -> None:
        """Wrap a model."""
        super().__init__()
        self.model, self.processor, self.size, self.most = model, processor, size, most

    def forward(self, pixel_values: torch.Tensor) -> dict[str, torch.Tensor]:
        """`[batch, 3, height, width]` -> outputs as of the graph."""
        outputs = self.model(pixel_values=pixel_values, return_dict=True)
        found = self.processor.post_process_object_detection(
            outputs, threshold=LEAST_SCORE, target_sizes=[self.size] * len(pixel_values)
        )
        return pad_found(found, self.most)


class QuerySegmenter(nn.Module):
    """MaskFormer and Mask2Former: each query is a mask with class scores.

    Attributes:
        model: Model of transformers.
        size: `(height, width)` to which masks are interpolated before summation, or None.

    Source: `post_process_semantic_segmentation` of `MaskFormerImageProcessor` and `Mask2FormerImageProcessor`.
    """

    def __init__(self, model: Any, size: tuple[int, int] | None) -> None:
        """Wrap a model."""
        super().__init__()
        self.model, self.size = model, size

    def forward(self, pixel_values: torch.Tensor) -> dict[str, torch.Tensor]:
        """`[batch, 3, height, width]` -> `scores` `[batch, classes, height, width]`, at the masks' own size."""
        found = self.model(pixel_values=pixel_values, return_dict=True)
        masks = self._interpolated(found["masks_queries_logits"]).sigmoid()
        classes = found["class_queries_logits"].softmax(-1)[..., :-1].transpose(1, 2)
        return {"scores": (classes @ masks.flatten(2)).unflatten(2, masks.shape[-2:])}

    def _interpolated(self, masks: torch.Tensor) -> torch.Tensor:
        if self.size is None:
            return masks
        return nn.functional.interpolate(masks, size=self.size, mode="bilinear", align_corners=False)


class SegmenterLibrary(nn.Module):
    """The reference of a segmenter: the same model with its own processor."""

    def __init__(self, model: Any, processor: Any) -> None:
        """Wrap a model and its image processor."""
        super().__init__()
        self.model, self.processor = model, processor

    def forward(self, pixel_values: torch.Tensor) -> dict[str, torch.Tensor]:
        """`[batch, 3, height, width]` -> outputs as of the graph."""
        outputs = self.model(pixel_values=pixel_values, return_dict=True)
        found = self.processor.post_process_semantic_segmentation(outputs, return_segmentation_scores=True)
        return {"scores": torch.stack([each["segmentation_scores"] for each in found])}


class PixelSegmenter(nn.Module):
    """SegFormer and other models with class scores per pixel."""

    def __init__(self, model: Any) -> None:
        """Wrap a model."""
        super().__init__()
        self.model = model

    def forward(self, pixel_values: torch.Tensor) -> dict[str, torch.Tensor]:
        """`[batch, 3, height, width]` -> `scores` `[batch, classes, height, width]`, at the model's own size."""
        return {"scores": self.model(pixel_values=pixel_values, return_dict=True)["logits"]}


def limited(queries: int, classes: int) -> int:
    """Limit the number of detections as the processor does; with few queries, to all pairs of query and class."""
    return min(_MOST, queries * classes)
