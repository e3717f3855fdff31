"""Tasks of transformers' detectors, segmenters and backbones.

For each task there is a module for batches with the outputs that the task needs, and as its reference the library's own
post-processing, image by image.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from graphkiln_backend.graph.errors import ConversionError
from graphkiln_backend.graph.task import Embedding, Segmentation, Task
from graphkiln_converters.detection.candidates import DETECTION, Candidates, best_of_all_classes
from graphkiln_converters.detection.torchvision import pad_found
from graphkiln_converters.detection.yolo import LEAST_SCORE, corners_of
from graphkiln_converters.recipe import BoxFormat
from graphkiln_converters.torch_libraries import import_torchvision

import_torchvision()
import transformers  # noqa: E402 - transformers imports torchvision

_FIND_BY_TEXT = ("owlvit", "owlv2", "grounding-dino", "mm-grounding-dino", "omdet-turbo")
_SEGMENT_BY_TEXT = ("clipseg", "oneformer", "sam3", "sam3_lite_text", "sam3_video")
_SEGMENT_BY_POINT = (
    "sam",
    "sam_hq",
    "sam2",
    "sam2_video",
    "sam3_tracker",
    "sam3_tracker_video",
    "edgetam",
    "edgetam_video",
)
# Unsupported model types, which need more than an image -> their use.
_PROMPTED = {
    **dict.fromkeys(_FIND_BY_TEXT, "finds what a text names"),
    **dict.fromkeys(_SEGMENT_BY_TEXT, "segments what a text names"),
    **dict.fromkeys(_SEGMENT_BY_POINT, "segments what a point or a box names"),
    "seggpt": "segments what another image and its mask show",
}
# Parts of class names of models that are not backbones.
_OF_OTHER_TASKS = re.compile("For(?!ImageClassification)[A-Z]")
_OF_ANY_SIZE = ("ForObjectDetection", "Segmentation", "ForDepthEstimation")
_SOFTMAX = {"detr": "Detr", "table-transformer": "Detr", "yolos": "Yolos"}
_FOCAL = {
    "conditional_detr": "ConditionalDetr",
    "dab-detr": "ConditionalDetr",
    "deformable_detr": "DeformableDetr",
    "lw_detr": "DeformableDetr",
    "rt_detr": "RTDetr",
    "rt_detr_v2": "RTDetr",
    "d_fine": "RTDetr",
    "deimv2": "RTDetr",
    "rf_detr": "RfDetr",
}
# Source: `top_k` of `ConditionalDetrImageProcessor.post_process_object_detection`.
_MOST_DETECTIONS = 100
# Processors that return one detection per query.
_UNLIMITED = ("RTDetr", "RfDetr")
# Unsupported detector types, which do not return boxes with classes -> their output.
_OTHER_OUTPUTS = {
    **dict.fromkeys(
        ("pp_doclayout_v2", "pp_doclayout_v3", "pp_doclayout_v4"),
        "it returns the parts of a page in reading order, which boxes do not have",
    ),
    **dict.fromkeys(
        ("pp_ocrv5_mobile_det", "pp_ocrv5_server_det", "pp_ocrv6_medium_det", "pp_ocrv6_small_det"),
        "it returns a map of text regions, from whose outlines rotated boxes are computed outside of the model",
    ),
}
# Model type -> size to which its processor interpolates masks. Source: `Mask2FormerImageProcessor`.
_MASKS: dict[str, tuple[int, int] | None] = {"maskformer": None, "mask2former": (384, 384)}


@dataclass(frozen=True, kw_only=True, slots=True)
class ImageTask:
    """A transformers model for one task.

    Attributes:
        module: Module with the outputs of the task.
        task: The task.
        reference: The library's own implementation, or None if `module` is already that.
    """

    module: nn.Module
    task: Task
    reference: nn.Module | None = None


def image_task(model: Any, size: tuple[int, int], requested: str) -> ImageTask | None:
    """Wrap a model for its own or the requested task; None for models without one of these tasks.

    Args:
        model: transformers model with image input.
        size: `(height, width)` of its input in pixels.
        requested: A task, or `auto`.

    Raises:
        ConversionError: The model needs a text with each image, or is of an unknown kind.
    """
    kind = type(model).__name__
    if requested == "embedding":
        if _OF_OTHER_TASKS.search(kind):
            raise ConversionError(
                f"--task embedding: {kind} is made for another task, and its output is not a vector of the image",
                hint="save its backbone (AutoModel.from_pretrained(...).save_pretrained(FOLDER)), and convert that",
            )
        return ImageTask(module=Pooled(model), task=Embedding(vectors="vectors"))
    if kind.endswith("ForObjectDetection"):
        return _detector(model, size)
    if kind.endswith("ForSemanticSegmentation"):
        return ImageTask(module=PixelSegmenter(model), task=Segmentation(scores="scores"))
    if model.config.model_type in _MASKS and kind.endswith("Segmentation"):
        return _query_segmenter(model)
    if kind.endswith("Segmentation"):
        raise ConversionError(
            f"transformers' {kind} is not supported: the meaning of its segments is unknown",
            hint="supported are ...ForSemanticSegmentation, MaskFormer and Mask2Former; or wrap it in a module that "
            "returns class scores: python:FILE:FACTORY --task segmentation",
        )
    return None


def takes_images_of_any_size(model: Any) -> bool:
    """Return true for models whose processors keep the aspect ratio of whole images."""
    return type(model).__name__.endswith(_OF_ANY_SIZE)


def check_takes_images_alone(config: Any, location: str) -> None:
    """Refuse models that need a text, a point or a box with each image.

    Raises:
        ConversionError: The model needs more than an image.
    """
    if does := _PROMPTED.get(config.model_type):
        task = "detection" if config.model_type in _FIND_BY_TEXT else "segmentation"
        raise ConversionError(
            f"'{location}' {does} ({config.model_type}): {task} takes images only",
            hint="fix the prompt in a module that returns the outputs of the task (docs/tasks.md): "
            f"python:FILE:FACTORY --task {task}",
        )


def _detector(model: Any, size: tuple[int, int]) -> ImageTask:
    kind = model.config.model_type
    name = _SOFTMAX.get(kind) or _FOCAL.get(kind)
    if name is None:
        why = _OTHER_OUTPUTS.get(kind, "the meaning of its outputs is unknown")
        raise ConversionError(
            f"transformers' {type(model).__name__} is not supported: {why}",
            hint=f"supported are {', '.join(sorted((*_SOFTMAX, *_FOCAL)))}; or wrap it: python:FILE:FACTORY "
            "--task detection",
        )
    queries = int(getattr(model.config, "num_queries", 0) or model.config.num_detection_tokens)
    focal = kind in _FOCAL
    limited = focal and name not in _UNLIMITED
    most = min(_MOST_DETECTIONS, queries * model.config.num_labels) if limited else queries
    return ImageTask(
        module=QueryDetector(model, size, focal=focal, most=most),
        reference=QueryLibrary(model, _processor(name), size, most),
        task=DETECTION,
    )


def _query_segmenter(model: Any) -> ImageTask:
    kind = model.config.model_type
    name = {"maskformer": "MaskFormer", "mask2former": "Mask2Former"}[kind]
    return ImageTask(
        module=QuerySegmenter(model, _MASKS[kind]),
        reference=SegmenterLibrary(model, _processor(name)),
        task=Segmentation(scores="scores"),
    )


def _processor(name: str) -> Any:
    """Make an image processor for post-processing, which is independent of its settings."""
    kind = getattr(transformers, f"{name}ImageProcessorPil", None) or getattr(transformers, f"{name}ImageProcessor")
    return kind()


class Pooled(nn.Module):
    """An image embedding: the input of a classifier head, or the pooled features of a backbone."""

    def __init__(self, model: Any) -> None:
        """Wrap a model without the last layer of a classifier."""
        super().__init__()
        self.model = model
        if type(model).__name__.endswith("ForImageClassification"):
            _leave_out_head(model)

    def forward(self, pixel_values: torch.Tensor) -> dict[str, torch.Tensor]:
        """`[batch, channels, height, width]` -> `vectors` `[batch, features]`, and transformers' own outputs."""
        found = self.model(pixel_values=pixel_values, return_dict=True)
        names = ("last_hidden_state", "pooler_output", "image_embeds")
        own = {name: found[name] for name in names if found.get(name) is not None}
        return {"vectors": _vectors(found), **own}


def _vectors(found: Any) -> torch.Tensor:
    for name in ("image_embeds", "pooler_output", "logits"):
        if found.get(name) is not None:
            vectors: torch.Tensor = found[name]
            return vectors.flatten(1)
    hidden: torch.Tensor = found["last_hidden_state"]
    return hidden[:, 0] if hidden.dim() == 3 else hidden.mean((2, 3))


def _leave_out_head(model: Any) -> None:
    """Replace a classifier's last layer by an identity."""
    head = getattr(model, "classifier", None)
    if isinstance(head, nn.Linear):
        model.classifier = nn.Identity()
    elif isinstance(head, nn.Sequential) and isinstance(head[-1], nn.Linear):
        head[-1] = nn.Identity()
    else:
        raise ConversionError(
            f"--task embedding: the last layer of {type(model).__name__} cannot be identified",
            hint="save the backbone without its head (AutoModel), or wrap it: python:FILE:FACTORY --task embedding",
        )


# Modules for batches, and their references.


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
        super().__init__()
        self.model, self.size, self.focal, self.most = model, size, focal, most

    def forward(self, pixel_values: torch.Tensor) -> dict[str, torch.Tensor]:
        """`[batch, 3, height, width]` -> see `Candidates.padded`."""
        found = self.model(pixel_values=pixel_values, return_dict=True)
        boxes = corners_of(found["pred_boxes"], BoxFormat.UNIT_CENTER, self.size)
        if self.focal:
            candidates = best_of_all_classes(boxes, found["logits"].sigmoid(), self.most)
        else:
            candidates = Candidates(boxes, *found["logits"].softmax(-1)[..., :-1].max(-1))
        return candidates.above(LEAST_SCORE).padded(self.most)


class QueryLibrary(nn.Module):
    """The reference: the same model with its own processor, image by image.

    Attributes:
        model: Model of transformers.
        processor: Its image processor.
        size: `(height, width)` of its input in pixels.
        most: Maximum number of detections per image.
    """

    def __init__(self, model: Any, processor: Any, size: tuple[int, int], most: int) -> None:
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
        super().__init__()
        self.model, self.size = model, size

    def forward(self, pixel_values: torch.Tensor) -> dict[str, torch.Tensor]:
        """`[batch, 3, height, width]` -> `scores` `[batch, classes, height, width]`, at the masks' own size."""
        found = self.model(pixel_values=pixel_values, return_dict=True)
        masks = found["masks_queries_logits"]
        if self.size is not None:
            masks = nn.functional.interpolate(masks, size=self.size, mode="bilinear", align_corners=False)
        classes = found["class_queries_logits"].softmax(-1)[..., :-1].transpose(1, 2)
        return {"scores": (classes @ masks.sigmoid().flatten(2)).unflatten(2, masks.shape[-2:])}


class SegmenterLibrary(nn.Module):
    """The reference of a segmenter: the same model with its own processor."""

    def __init__(self, model: Any, processor: Any) -> None:
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
        super().__init__()
        self.model = model

    def forward(self, pixel_values: torch.Tensor) -> dict[str, torch.Tensor]:
        """`[batch, 3, height, width]` -> `scores` `[batch, classes, height, width]`, at the model's own size."""
        return {"scores": self.model(pixel_values=pixel_values, return_dict=True)["logits"]}
