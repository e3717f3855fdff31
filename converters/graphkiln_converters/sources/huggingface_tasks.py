"""Tasks of transformers' detectors, segmenters and backbones: modules with the outputs that a task needs."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from graphkiln_backend.graph.errors import ConversionError
from graphkiln_backend.graph.task import Embedding, Segmentation, Task
from graphkiln_converters.detection.candidates import DETECTION
from graphkiln_converters.detection.queries import (
    PixelSegmenter,
    QueryDetector,
    QueryLibrary,
    QuerySegmenter,
    SegmenterLibrary,
    limited,
)
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
# Parts of class names of models that are no backbones.
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
# Processors that return one detection per query.
_UNLIMITED = ("RTDetr", "RfDetr")
# Unsupported detector types, which do not return boxes with classes -> their output.
_READ_OTHERWISE = {
    **dict.fromkeys(
        ("pp_doclayout_v2", "pp_doclayout_v3", "pp_doclayout_v4"),
        "it returns the parts of a page in the order in which they are read, and boxes alone would lose that",
    ),
    **dict.fromkeys(
        ("pp_ocrv5_mobile_det", "pp_ocrv5_server_det", "pp_ocrv6_medium_det", "pp_ocrv6_small_det"),
        "it returns a map of where there is text, whose outlines become turned boxes behind the model",
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
        _check_has_vectors(kind)
        return ImageTask(module=Pooled(model), task=Embedding(vectors="vectors"))
    if kind.endswith("ForObjectDetection"):
        return _detector(model, size)
    if kind.endswith("ForSemanticSegmentation"):
        return ImageTask(module=PixelSegmenter(model), task=Segmentation(scores="scores"))
    if model.config.model_type in _MASKS and kind.endswith("Segmentation"):
        return _query_segmenter(model)
    if kind.endswith("Segmentation"):
        raise ConversionError(
            f"how segments of transformers' {kind} are read is not known",
            hint="known are ...ForSemanticSegmentation, MaskFormer and Mask2Former; or return class scores from a "
            "module of your own: python:FILE:FACTORY --task segmentation",
        )
    return None


def _check_has_vectors(kind: str) -> None:
    if _OF_OTHER_TASKS.search(kind):
        raise ConversionError(
            f"--task embedding: {kind} is made for something else, and what it returns is no vector of the image",
            hint="save its backbone (AutoModel.from_pretrained(...).save_pretrained(FOLDER)), and convert that",
        )


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
            f"'{location}' {does} ({config.model_type}), and an image brings none: {task} takes images alone",
            hint="fix it in a module of your own, which returns the outputs of the task (docs/tasks.md): "
            f"python:FILE:FACTORY --task {task}",
        )


def _detector(model: Any, size: tuple[int, int]) -> ImageTask:
    kind = model.config.model_type
    name = _SOFTMAX.get(kind) or _FOCAL.get(kind)
    if name is None:
        raise _unknown_detector(model)
    queries = int(getattr(model.config, "num_queries", 0) or model.config.num_detection_tokens)
    focal = kind in _FOCAL
    most = limited(queries, model.config.num_labels) if focal and name not in _UNLIMITED else queries
    return ImageTask(
        module=QueryDetector(model, size, focal=focal, most=most),
        reference=QueryLibrary(model, _processor(name), size, most),
        task=DETECTION,
    )


def _unknown_detector(model: Any) -> ConversionError:
    known = ", ".join(sorted((*_SOFTMAX, *_FOCAL)))
    why = _READ_OTHERWISE.get(model.config.model_type, "how its detections are read is not known")
    return ConversionError(
        f"transformers' {type(model).__name__} is not converted: {why}",
        hint=f"known are {known}; or wrap it: python:FILE:FACTORY --task detection",
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
    """Make an image processor for post-processing, which depends on none of its settings."""
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
            f"--task embedding: where {type(model).__name__} has its last layer is not known",
            hint="save the backbone without its head (AutoModel), or wrap it: python:FILE:FACTORY --task embedding",
        )
