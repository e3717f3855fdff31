"""`timm:ARCHITECTURE`: models of pytorch-image-models, as classifiers or as backbones."""

from __future__ import annotations

import math
from typing import Any

import torch

from graphkiln_backend.graph.errors import ConversionError
from graphkiln_backend.graph.preprocess import Preprocess
from graphkiln_backend.graph.task import Embedding
from graphkiln_backend.graph.text import did_you_mean
from graphkiln_converters.recipe import Recipe
from graphkiln_converters.sources.base import InputSpec, image_shape
from graphkiln_converters.sources.pytorch import TorchModel, freeze
from graphkiln_converters.torch_libraries import import_torchvision
from graphkiln_converters.weights import load_weights, not_downloaded, trained_classes

import_torchvision()
import timm  # noqa: E402 - timm imports torchvision
from timm.data.config import resolve_data_config  # noqa: E402
from timm.data.imagenet_info import ImageNetInfo  # noqa: E402

_INTERPOLATIONS = {"nearest", "bilinear", "bicubic"}
_IMAGENET_CLASSES = 1000


def list_architectures(pattern: str = "") -> list[str]:
    """List architectures whose names match a pattern such as `resnet*`; all by default."""
    names: list[str] = timm.list_models(pattern)
    return names


def open_source(location: str, recipe: Recipe) -> TorchModel:
    """Open an architecture with random, published or own weights.

    Raises:
        ConversionError: The architecture does not exist, has no feature maps, or the weights do not fit.
    """
    name = location.partition(".")[0]
    if not timm.is_model(name):
        raise ConversionError(f"timm has no architecture '{location}'", hint=did_you_mean(name, timm.list_models()))
    torch.manual_seed(0)
    module = _create(location, recipe)
    if recipe.weights:
        if classes := trained_classes(module, recipe.weights):
            module = _create(location, recipe, num_classes=classes)
        load_weights(module, recipe.weights)
    embeds = recipe.task == "embedding" and not recipe.features_only
    if embeds:
        try:
            module.reset_classifier(0)  # without its last layer, a classifier returns pooled features
        except (AttributeError, TypeError, ValueError, AssertionError) as error:
            raise ConversionError(
                f"timm's {location} has no pooled features: {error}", hint="choose another, or --features-only"
            ) from error
    config = resolve_data_config(  # type: ignore[no-untyped-call]
        getattr(module, "pretrained_cfg", {}), model=module
    )
    shape = image_shape(recipe, tuple(config["input_size"]))
    classes = 0 if recipe.features_only else getattr(module, "num_classes", 0)
    return TorchModel(
        module=freeze(module),
        description=f"timm:{location}",
        random_weights=recipe.has_random_weights,
        libraries=("torch", "timm"),
        inputs=(InputSpec(name="image", shape=shape),),
        preprocess=preprocess_from_config(config, shape),
        labels=tuple(map(ImageNetInfo().index_to_description, range(classes))) if classes == _IMAGENET_CLASSES else (),
        task=Embedding(vectors="output") if embeds else None,
    )


def _create(location: str, recipe: Recipe, **settings: Any) -> Any:
    if recipe.features_only:
        settings["features_only"] = True
    if recipe.out_indices:
        settings["out_indices"] = recipe.out_indices
    try:
        # Exportable layers: timm's own switch for jitted ones that tracing cannot follow.
        return timm.create_model(location, pretrained=recipe.pretrained, exportable=True, **settings)
    except OSError as error:
        raise not_downloaded(location, error) from error
    except (RuntimeError, AttributeError, TypeError, AssertionError, IndexError) as error:
        raise ConversionError(f"timm cannot create {location} with these options: {error}") from error


def preprocess_from_config(config: dict[str, Any], shape: tuple[int, ...]) -> Preprocess | None:
    """Make the spec of a model's `resolve_data_config`; None if a spec cannot express it.

    Source: `timm.data.transforms_imagenet_eval`: resize to size / crop_pct, center crop, normalize.
    """
    _, height, width = shape
    squash = config.get("crop_mode") == "squash"
    # A spec cannot express timm's borders, nor that the longer side is rounded in images that are not square.
    expressible = squash or (config.get("crop_mode", "center") == "center" and height == width)
    if config["interpolation"] not in _INTERPOLATIONS or not expressible:
        return None
    scaled = tuple(math.floor(side / float(config["crop_pct"])) for side in (height, width))
    return Preprocess(
        resize=(scaled[0], scaled[1]) if squash else scaled[0],
        crop=(height, width),
        interpolation=config["interpolation"],
        mean=config["mean"],
        std=config["std"],
        color="RGB" if shape[0] == 3 else "L",
    )
