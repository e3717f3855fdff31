"""transformers' detectors and segmenters of queries: what their processors do behind the model, for batches."""

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
    """DETR and its kin: each query is a box, with scores of classes.

    Attributes:
        model: Of transformers.
        size: `(height, width)` of its input in pixels.
        focal: Each class has an independent probability; else those of a query and of "nothing" add up to 1.
        most: Most detections of an image.

    Source: `post_process_object_detection` of `DetrImageProcessor`, `ConditionalDetrImageProcessor` and
    `RTDetrImageProcessor`.
    """

    def __init__(self, model: Any, size: tuple[int, int], *, focal: bool, most: int) -> None:
        """Take a model over."""
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
    """The same model, read by its processor image by image: the reference.

    Attributes:
        model: Of transformers.
        processor: Its image processor.
        size: `(height, width)` of its input in pixels.
        most: Most detections of an image.
    """

    def __init__(self, model: Any, processor: Any, size: tuple[int, int], most: int) -> None:
        """Take a model over."""
        super().__init__()
        self.model, self.processor, self.size, self.most = model, processor, size, most

    def forward(self, pixel_values: torch.Tensor) -> dict[str, torch.Tensor]:
        """`[batch, 3, height, width]` -> what the graph returns for it."""
        outputs = self.model(pixel_values=pixel_values, return_dict=True)
        found = self.processor.post_process_object_detection(
            outputs, threshold=LEAST_SCORE, target_sizes=[self.size] * len(pixel_values)
        )
        return pad_found(found, self.most)


class QuerySegmenter(nn.Module):
    """MaskFormer and Mask2Former: each query is a mask, with scores of classes.

    Attributes:
        model: Of transformers.
        size: `(height, width)` that masks are interpolated to before they are summed up, or None.

    Source: `post_process_semantic_segmentation` of `MaskFormerImageProcessor` and `Mask2FormerImageProcessor`.
    """

    def __init__(self, model: Any, size: tuple[int, int] | None) -> None:
        """Take a model over."""
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
    """The same model, read by its processor: the reference of a segmenter."""

    def __init__(self, model: Any, processor: Any) -> None:
        """Take a model over, and its image processor."""
        super().__init__()
        self.model, self.processor = model, processor

    def forward(self, pixel_values: torch.Tensor) -> dict[str, torch.Tensor]:
        """`[batch, 3, height, width]` -> what the graph returns for it."""
        outputs = self.model(pixel_values=pixel_values, return_dict=True)
        found = self.processor.post_process_semantic_segmentation(outputs, return_segmentation_scores=True)
        return {"scores": torch.stack([each["segmentation_scores"] for each in found])}


class PixelSegmenter(nn.Module):
    """SegFormer and others whose model scores the classes of each pixel itself."""

    def __init__(self, model: Any) -> None:
        """Take a model over."""
        super().__init__()
        self.model = model

    def forward(self, pixel_values: torch.Tensor) -> dict[str, torch.Tensor]:
        """`[batch, 3, height, width]` -> `scores` `[batch, classes, height, width]`, at the model's own size."""
        return {"scores": self.model(pixel_values=pixel_values, return_dict=True)["logits"]}


def limited(queries: int, classes: int) -> int:
    """Number of detections of a processor that limits them: with few queries, every pair with a class."""
    return min(_MOST, queries * classes)
