"""torchvision's detectors and segmenters with the heads that their weights were trained for."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from graphkiln_converters.sources.base import SourceOptions
from graphkiln_converters.torch_libraries import import_torchvision
from graphkiln_converters.weights import load_weights, not_downloaded, trained_shapes

torchvision = import_torchvision()
_CLASS_LAYERS = (
    "roi_heads.box_predictor.cls_score",
    "head.classification_head.cls_logits",
    "head.classification_head.module_list.0",
    "head.classification_head.module_list.0.1",
    "classifier.4",
    "classifier.low_classifier",
)
"""What has outputs for each class: two-stage detectors, RetinaNet and FCOS, SSD, SSDlite, DeepLabV3 and FCN, LRASPP."""
_KEYPOINT_LAYER = "roi_heads.keypoint_predictor.kps_score_lowres.weight"
_AUXILIARY = "aux_classifier."


class Built(NamedTuple):
    """A model in evaluation mode.

    Attributes:
        model: torchvision's.
        classes: How many it has.
        names: Of the classes; empty where its weights are of other ones than torchvision's.
    """

    model: Any
    classes: int
    names: tuple[str, ...]


def build_model(location: str, options: SourceOptions) -> Built:
    """A detector or a segmenter.

    Args:
        location: torchvision's name.
        options: Whether it gets random, published or own weights.

    Raises:
        ConversionError: The weights cannot be had, or are of another architecture.
    """
    published = torchvision.models.get_model_weights(location).DEFAULT
    categories = tuple(published.meta["categories"])
    build = partial(torchvision.models.get_model, location, weights_backbone=None)
    torch.manual_seed(0)
    try:
        model = build(weights=published if options.pretrained else None)
    except OSError as error:
        raise not_downloaded(location, error) from error
    heads: dict[str, Any] = {}
    if options.weights:
        heads = trained_heads(model, options.weights, len(categories))
        model = build(weights=None, **heads) if heads else model
        load_weights(model, options.weights)
    classes = int(heads.get("num_classes", len(categories)))
    return Built(model.eval(), classes, categories if classes == len(categories) else ())


def trained_heads(model: nn.Module, path: Path, classes: int) -> dict[str, Any]:
    """What a model must be built with to hold the weights of a file; empty where it can hold them as it is.

    Args:
        model: As torchvision builds it.
        path: As for `load_weights`.
        classes: How many it has.

    Raises:
        ConversionError: The file cannot be read.
    """
    trained = trained_shapes(model, path)
    own = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    differing = {name for name in trained.keys() & own.keys() if trained[name] != own[name]}
    heads: dict[str, Any] = {}
    for name in (f"{layer}.weight" for layer in _CLASS_LAYERS):
        if name in differing:  # some have outputs for each class and anchor
            heads["num_classes"] = trained[name][0] * classes // own[name][0]
    if _KEYPOINT_LAYER in differing:
        heads["num_keypoints"] = trained[_KEYPOINT_LAYER][1]
    if _has_auxiliary(trained) and not _has_auxiliary(own):
        heads["aux_loss"] = True
    return heads


def _has_auxiliary(shapes: dict[str, tuple[int, ...]]) -> bool:
    """Whether a segmenter has the head that only its training reads."""
    return any(name.startswith(_AUXILIARY) for name in shapes)
