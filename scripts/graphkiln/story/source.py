"""The source model of a story: a PyTorch classifier of one image."""

from __future__ import annotations

from typing import TYPE_CHECKING

from graphkiln.story.request import StoryRequest
from graphkiln_backend.graph.decoding import decode
from graphkiln_backend.graph.errors import ConversionError
from graphkiln_backend.graph.preprocess import Preprocess

if TYPE_CHECKING:
    from graphkiln_converters.sources.pytorch import TorchModel


def open_source_model(request: StoryRequest) -> TorchModel:
    """Opens the source model; the caller closes it.

    Raises:
        ConversionError: It is no PyTorch model with one image as its input, or its preprocessing is not known.
    """
    from graphkiln_converters.sources.base import SourceOptions, open_source
    from graphkiln_converters.sources.pytorch import TorchModel

    shape = (3, request.image_size, request.image_size)
    model = open_source(request.source, SourceOptions(weights=request.weights, shapes={"": shape}))
    if not isinstance(model, TorchModel) or len(model.inputs) != 1 or model.keywords:
        model.close()
        raise ConversionError(
            f"the story of {request.source} cannot be told: it begins with a PyTorch model of one image",
            hint="torchvision:ARCH, timm:ARCH, or python:FILE:FACTORY",
        )
    source_preprocess(model, request)
    return model


def source_preprocess(model: TorchModel, request: StoryRequest) -> Preprocess:
    """How an image becomes the model's input: as requested, else as the source declares it.

    Raises:
        ConversionError: Neither says so.
        ManifestError: What was requested is not a valid preprocess spec.
    """
    if request.preprocess is not None:
        return decode(Preprocess, request.preprocess, path="preprocess")
    if model.preprocess is None:
        raise ConversionError(
            f"nobody says how an image becomes the input of {request.source}",
            hint='give --preprocess \'{"resize": 256, "crop": [224, 224], "mean": [...], "std": [...]}\'',
        )
    return model.preprocess
