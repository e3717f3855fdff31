"""`torchvision:ARCHITECTURE`: classifiers of torchvision.models."""

from __future__ import annotations

import torch

from graphkiln.converters.pytorch import TorchModel, torch_model
from graphkiln.converters.sources.base import InputSpec, SourceOptions
from graphkiln.converters.torch_libraries import import_torchvision
from graphkiln.converters.weights import load_weights, not_downloaded
from graphkiln.graph.errors import ConversionError
from graphkiln.graph.preprocess import Preprocess
from graphkiln.graph.spelling import did_you_mean

torchvision = import_torchvision()


def open_source(location: str, options: SourceOptions) -> TorchModel:
    """Opens an architecture with random, published or own weights.

    Raises:
        ConversionError: There is no such architecture, or the weights are not its own.
    """
    known = torchvision.models.list_models(module=torchvision.models)
    if location not in known:
        raise ConversionError(f"torchvision has no classifier '{location}'", hint=did_you_mean(location, known))
    published = torchvision.models.get_model_weights(location).DEFAULT
    torch.manual_seed(0)
    try:
        module = torchvision.models.get_model(location, weights=published if options.pretrained else None)
    except OSError as error:
        raise not_downloaded(location, error) from error
    if options.weights:
        load_weights(module, options.weights)
    transforms = published.transforms()
    side = transforms.crop_size[0]
    return torch_model(
        module,
        description=f"torchvision:{location}",
        libraries=("torch", "torchvision"),
        inputs=(InputSpec(name="image", shape=options.shapes.get("", (3, side, side))),),
        preprocess=Preprocess(
            resize=transforms.resize_size[0],
            crop=(side, side),
            interpolation=transforms.interpolation.value,
            mean=tuple(transforms.mean),
            std=tuple(transforms.std),
        ),
        labels=_labels(module, published.meta["categories"]),
    )


def _labels(module: torch.nn.Module, categories: list[str]) -> tuple[str, ...]:
    """ImageNet's class names, where the last layer has as many outputs."""
    last = [layer for layer in module.modules() if isinstance(layer, (torch.nn.Linear, torch.nn.Conv2d))][-1]
    classes = last.out_features if isinstance(last, torch.nn.Linear) else last.out_channels
    return tuple(categories) if classes == len(categories) else ()
