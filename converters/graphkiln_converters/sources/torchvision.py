"""`torchvision:ARCHITECTURE`: classifiers, detectors and segmenters."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from graphkiln_backend.graph.errors import ConversionError
from graphkiln_backend.graph.preprocess import Letterbox, Preprocess
from graphkiln_backend.graph.task import Detection, Segmentation
from graphkiln_backend.graph.text import did_you_mean
from graphkiln_converters.detection.candidates import DETECTION
from graphkiln_converters.detection.torchvision import ByLevel, LibraryPipeline, Ssd, TwoStage
from graphkiln_converters.recipe import Recipe
from graphkiln_converters.sources.base import InputSpec, image_shape
from graphkiln_converters.sources.pytorch import TorchModel, freeze
from graphkiln_converters.torch_libraries import import_torchvision
from graphkiln_converters.weights import load_weights, not_downloaded, trained_classes, trained_shapes

torchvision = import_torchvision()


def list_architectures() -> list[str]:
    """List the classifiers of torchvision."""
    names: list[str] = torchvision.models.list_models(module=torchvision.models)
    return names


def open_source(location: str, recipe: Recipe) -> TorchModel:
    """Open an architecture with random, published or own weights.

    Raises:
        ConversionError: The architecture does not exist, or the weights do not fit.
    """
    if location in list_detectors():
        return open_detector(location, recipe)
    if location in list_segmenters():
        return open_segmenter(location, recipe)
    known = list_architectures()
    if location not in known:
        known = [*known, *list_detectors(), *list_segmenters()]
        raise ConversionError(f"torchvision has no model '{location}'", hint=did_you_mean(location, known))
    published = torchvision.models.get_model_weights(location).DEFAULT
    torch.manual_seed(0)
    try:
        module = torchvision.models.get_model(location, weights=published if recipe.pretrained else None)
    except OSError as error:
        raise not_downloaded(location, error) from error
    if recipe.weights:
        if classes := trained_classes(module, recipe.weights):
            module = torchvision.models.get_model(location, num_classes=classes)
        load_weights(module, recipe.weights)
    transforms = published.transforms()
    side = transforms.crop_size[0]
    shape = image_shape(recipe, (3, side, side))
    last = [layer for layer in module.modules() if isinstance(layer, torch.nn.Linear | torch.nn.Conv2d)][-1]
    categories = tuple(published.meta["categories"])
    return TorchModel(
        module=freeze(module),
        **_described(location, recipe, shape),
        preprocess=preprocess_from_transforms(transforms, shape),
        labels=categories if len(last.weight) == len(categories) else (),
    )


def _described(location: str, recipe: Recipe, shape: tuple[int, ...]) -> dict[str, Any]:
    """Fields common to all models of torchvision."""
    return {
        "description": f"torchvision:{location}",
        "random_weights": recipe.has_random_weights,
        "libraries": ("torch", "torchvision"),
        "inputs": (InputSpec(name="image", shape=shape),),
    }


def preprocess_from_transforms(transforms: Any, shape: tuple[int, ...]) -> Preprocess:
    """Make the spec of published transforms; for another shape `(channels, height, width)`, resize and crop scale."""
    _, height, width = shape
    published = transforms.crop_size[0]
    return Preprocess(
        resize=round(transforms.resize_size[0] * min(height, width) / published),
        crop=(height, width),
        interpolation=transforms.interpolation.value,
        mean=tuple(transforms.mean),
        std=tuple(transforms.std),
    )


# torchvision's detectors and segmenters, built with heads that fit the weights.

# Layers with outputs per class: two-stage detectors, RetinaNet and FCOS, SSD, SSDlite, DeepLabV3 and FCN, LRASPP.
_CLASS_LAYERS = (
    "roi_heads.box_predictor.cls_score",
    "head.classification_head.cls_logits",
    "head.classification_head.module_list.0",
    "head.classification_head.module_list.0.1",
    "classifier.4",
    "classifier.low_classifier",
)
_KEYPOINT_LAYER = "roi_heads.keypoint_predictor.kps_score_lowres.weight"
_AUXILIARY = "aux_classifier."  # head of a segmenter for training


def build_model(location: str, recipe: Recipe) -> tuple[Any, int, tuple[str, ...]]:
    """Build a detector or a segmenter in evaluation mode.

    Returns:
        The model, its number of classes, and their names; no names for other classes than torchvision's.

    Raises:
        ConversionError: The weights cannot be loaded, or are of another architecture.
    """
    published = torchvision.models.get_model_weights(location).DEFAULT
    categories = tuple(published.meta["categories"])
    build = partial(torchvision.models.get_model, location, weights_backbone=None)
    torch.manual_seed(0)
    try:
        model = build(weights=published if recipe.pretrained else None)
    except OSError as error:
        raise not_downloaded(location, error) from error
    heads: dict[str, Any] = {}
    if recipe.weights:
        heads = trained_heads(model, recipe.weights, len(categories))
        model = build(weights=None, **heads) if heads else model
        load_weights(model, recipe.weights)
    classes = int(heads.get("num_classes", len(categories)))
    return model.eval(), classes, categories if classes == len(categories) else ()


def trained_heads(model: nn.Module, path: Path, classes: int) -> dict[str, Any]:
    """Find the options to build a model that fits the weights of a file; empty if none are needed.

    Raises:
        ConversionError: The file cannot be read.
    """
    trained = trained_shapes(model, path)
    own = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    differing = {name for name in trained.keys() & own.keys() if trained[name] != own[name]}
    heads: dict[str, Any] = {}
    for name in (f"{layer}.weight" for layer in _CLASS_LAYERS):
        if name in differing:  # some layers have outputs per class and anchor
            heads["num_classes"] = trained[name][0] * classes // own[name][0]
    if _KEYPOINT_LAYER in differing:
        heads["num_keypoints"] = trained[_KEYPOINT_LAYER][1]
    in_file, in_model = (any(name.startswith(_AUXILIARY) for name in shapes) for shapes in (trained, own))
    if in_file and not in_model:
        heads["aux_loss"] = True
    return heads


# `torchvision:ARCHITECTURE` for segmenters: DeepLabV3, FCN and LRASPP.


class _Scores(torch.nn.Module):
    """A segmenter without the scores of its auxiliary head."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, image: torch.Tensor) -> dict[str, torch.Tensor]:
        """`[batch, 3, height, width]` -> `scores` `[batch, classes, height, width]`."""
        return {"scores": self.model(image)["out"]}


def list_segmenters() -> list[str]:
    """List the segmenters of torchvision."""
    names: list[str] = torchvision.models.list_models(module=torchvision.models.segmentation)
    return names


def open_segmenter(location: str, recipe: Recipe) -> TorchModel:
    """Open a segmenter with random, published or own weights.

    Raises:
        ConversionError: The weights do not fit, or the size is invalid.
    """
    model, _, names = build_model(location, recipe)
    transforms = torchvision.models.get_model_weights(location).DEFAULT.transforms()
    side = int(transforms.resize_size[0])
    shape = image_shape(recipe, (3, side, side))
    return TorchModel(
        module=freeze(_Scores(model)),
        **_described(location, recipe, shape),
        preprocess=Preprocess(
            letterbox=Letterbox(size=(shape[1], shape[2]), padding=None),
            interpolation=transforms.interpolation.value,
            mean=tuple(transforms.mean),
            std=tuple(transforms.std),
        ),
        labels=names,
        task=Segmentation(scores="scores"),
    )


# `torchvision:ARCHITECTURE` for detectors: a graph of one image size, padded outputs, suppression inside.
#
# torchvision resizes inside its models, so a batch is a list of images of different sizes. Here the client resizes, the
# graph takes images of one size, and the proof compares it with torchvision's own pipeline after the resize. Two
# differences remain at the resize: Pillow's filter is antialiased, and padding is part of the image.

# Input pixels per cell of the coarsest feature map that all these models share.
_STRIDE = 32


def list_detectors() -> list[str]:
    """List the detectors of torchvision."""
    names: list[str] = torchvision.models.list_models(module=torchvision.models.detection)
    return names


def open_detector(location: str, recipe: Recipe) -> TorchModel:
    """Open a detector with random, published or own weights.

    Raises:
        ConversionError: The weights do not fit, or the size is invalid.
    """
    model, classes, names = build_model(location, recipe)
    transform = model.transform
    size = _size(transform, recipe)
    freeze(model)
    most = int(getattr(model, "roi_heads", model).detections_per_img)
    return TorchModel(
        module=detector_module(model, size).eval(),
        reference=LibraryPipeline(model, most).eval(),
        **_described(location, recipe, (3, *size)),
        preprocess=_preprocess(transform, size),
        labels=names,
        classes=classes,
        task=_task(model),
    )


def detector_module(model: Any, size: tuple[int, int]) -> torch.nn.Module:
    """Wrap a detector as a module for batches of one size.

    Raises:
        ConversionError: The kind of detector is unknown.
    """
    kinds = torchvision.models.detection
    if isinstance(model, kinds.ssd.SSD):
        return Ssd(model, size)
    if isinstance(model, kinds.retinanet.RetinaNet | kinds.fcos.FCOS):
        return ByLevel(model, size)
    if isinstance(model, kinds.faster_rcnn.FasterRCNN):
        return TwoStage(model, size)
    raise ConversionError(
        f"torchvision's {type(model).__name__} is not supported",
        hint="wrap it in a module that returns boxes, scores, classes and counts: python:FILE:FACTORY --task detection",
    )


def _task(model: Any) -> Detection:
    heads = getattr(model, "roi_heads", None)
    return replace(
        DETECTION,
        masks="masks" if heads and heads.has_mask() else None,
        keypoints="keypoints" if heads and heads.has_keypoint() else None,
    )


def _size(transform: Any, recipe: Recipe) -> tuple[int, int]:
    """Return `(height, width)` of the input: the requested size, or a square of the model's default size."""
    if transform.fixed_size:
        width, height = transform.fixed_size
    else:
        height = width = -(-int(transform.min_size[-1]) // _STRIDE) * _STRIDE
    _, height, width = image_shape(recipe, (3, height, width))
    if not transform.fixed_size and (height % _STRIDE or width % _STRIDE):
        raise ConversionError(
            f"sizes of torchvision's detectors are multiples of {_STRIDE} pixels, --shape is {height}x{width}",
            hint=f"--shape 3x{-(-height // _STRIDE) * _STRIDE}x{-(-width // _STRIDE) * _STRIDE}",
        )
    return height, width


def _preprocess(transform: Any, size: tuple[int, int]) -> Preprocess:
    """Source: `torchvision.models.detection.transform.GeneralizedRCNNTransform`."""
    mean, std = tuple(transform.image_mean), tuple(transform.image_std)
    if transform.fixed_size:
        return Preprocess(resize=size, mean=mean, std=std)
    fitted = Letterbox(size=size, padding=None, position="top-left", rounding="down")
    return Preprocess(letterbox=fitted, mean=mean, std=std)
