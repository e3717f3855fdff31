"""`torchvision:ARCHITECTURE` for segmenters: DeepLabV3, FCN and LRASPP."""

from __future__ import annotations

from typing import Any

import torch

from graphkiln_backend.graph.errors import ConversionError
from graphkiln_backend.graph.preprocess import Letterbox, Preprocess
from graphkiln_backend.graph.task import Segmentation
from graphkiln_converters.sources.base import InputSpec, SourceOptions, described
from graphkiln_converters.sources.pytorch import TorchModel, freeze
from graphkiln_converters.sources.torchvision_heads import build_model
from graphkiln_converters.torch_libraries import import_torchvision

torchvision = import_torchvision()


class _Scores(torch.nn.Module):
    """A segmenter that returns its scores, and not those of its auxiliary head."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, image: torch.Tensor) -> dict[str, torch.Tensor]:
        """`[batch, 3, height, width]` -> `scores` `[batch, classes, height, width]`."""
        return {"scores": self.model(image)["out"]}


def list_segmenters() -> list[str]:
    """The segmenters of torchvision."""
    names: list[str] = torchvision.models.list_models(module=torchvision.models.segmentation)
    return names


def open_segmenter(location: str, options: SourceOptions) -> TorchModel:
    """Opens a segmenter with random, published or own weights.

    Raises:
        ConversionError: The weights are not its own, or the size fits no image.
    """
    model, _, names = build_model(location, options)
    transforms = torchvision.models.get_model_weights(location).DEFAULT.transforms()
    side = int(transforms.resize_size[0])
    shape = options.shapes.get("", (3, side, side))
    if len(shape) != 3 or shape[0] != 3:
        raise ConversionError(f"a segmenter takes images, --shape gives {list(shape)}", hint="--shape 3x520x520")
    return TorchModel(
        module=freeze(_Scores(model)),
        description=described(f"torchvision:{location}", options),
        libraries=("torch", "torchvision"),
        inputs=(InputSpec(name="image", shape=shape),),
        preprocess=Preprocess(
            letterbox=Letterbox(size=(shape[1], shape[2]), padding=None),
            interpolation=transforms.interpolation.value,
            mean=tuple(transforms.mean),
            std=tuple(transforms.std),
        ),
        labels=names,
        task=Segmentation(scores="scores"),
    )
