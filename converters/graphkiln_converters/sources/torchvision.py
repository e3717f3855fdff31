"""`torchvision:ARCHITECTURE`: classifiers of torchvision.models; detectors and segmenters have modules of their own."""

from __future__ import annotations

from typing import Any

import torch

from graphkiln_backend.graph.errors import ConversionError
from graphkiln_backend.graph.preprocess import Preprocess
from graphkiln_backend.graph.spelling import did_you_mean
from graphkiln_converters.sources.base import InputSpec, SourceOptions, described
from graphkiln_converters.sources.pytorch import TorchModel, freeze
from graphkiln_converters.sources.torchvision_detection import list_detectors, open_detector
from graphkiln_converters.sources.torchvision_segmentation import list_segmenters, open_segmenter
from graphkiln_converters.torch_libraries import import_torchvision
from graphkiln_converters.weights import load_weights, not_downloaded, trained_classes

torchvision = import_torchvision()


def list_architectures() -> list[str]:
    """The classifiers of torchvision."""
    names: list[str] = torchvision.models.list_models(module=torchvision.models)
    return names


def open_source(location: str, options: SourceOptions) -> TorchModel:
    """Opens an architecture with random, published or own weights.

    Raises:
        ConversionError: There is no such architecture, or the weights are not its own.
    """
    if location in list_detectors():
        return open_detector(location, options)
    if location in list_segmenters():
        return open_segmenter(location, options)
    known = list_architectures()
    if location not in known:
        known = [*known, *list_detectors(), *list_segmenters()]
        raise ConversionError(f"torchvision has no model '{location}'", hint=did_you_mean(location, known))
    published = torchvision.models.get_model_weights(location).DEFAULT
    torch.manual_seed(0)
    try:
        module = torchvision.models.get_model(location, weights=published if options.pretrained else None)
    except OSError as error:
        raise not_downloaded(location, error) from error
    if options.weights:
        if classes := trained_classes(module, options.weights):
            module = torchvision.models.get_model(location, num_classes=classes)
        load_weights(module, options.weights)
    transforms = published.transforms()
    shape = options.shapes.get("", (3, *transforms.crop_size * 2))
    return TorchModel(
        module=freeze(module),
        description=described(f"torchvision:{location}", options),
        libraries=("torch", "torchvision"),
        inputs=(InputSpec(name="image", shape=shape),),
        preprocess=preprocess_from_transforms(transforms, shape),
        labels=_labels(module, published.meta["categories"]),
    )


def preprocess_from_transforms(transforms: Any, shape: tuple[int, ...]) -> Preprocess:
    """The spec of published transforms; for images of another size, resize and crop keep their ratio.

    Args:
        transforms: `torchvision.transforms._presets.ImageClassification`.
        shape: `(channels, height, width)` of the input.

    Raises:
        ConversionError: The shape is not that of an image.
    """
    if len(shape) != 3:
        raise ConversionError(f"an image has three dimensions, --shape gives {list(shape)}", hint="--shape 3x224x224")
    _, height, width = shape
    published = transforms.crop_size[0]
    return Preprocess(
        resize=round(transforms.resize_size[0] * min(height, width) / published),
        crop=(height, width),
        interpolation=transforms.interpolation.value,
        mean=tuple(transforms.mean),
        std=tuple(transforms.std),
    )


def _labels(module: torch.nn.Module, categories: list[str]) -> tuple[str, ...]:
    """ImageNet's class names, where the last layer has as many outputs."""
    last = [layer for layer in module.modules() if isinstance(layer, (torch.nn.Linear, torch.nn.Conv2d))][-1]
    classes = last.out_features if isinstance(last, torch.nn.Linear) else last.out_channels
    return tuple(categories) if classes == len(categories) else ()
