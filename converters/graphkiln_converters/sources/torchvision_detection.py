"""`torchvision:ARCHITECTURE` for detectors: a graph of one image size, padded outputs, suppression inside.

torchvision resizes inside of its models, so that every image has a size of its own and a batch is a list. Here the
client resizes, the graph takes images of one size, and the proof compares it with torchvision's own pipeline behind the
resize. Two differences remain, both at the resize: Pillow's filter is antialiased, and padding counts as image.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from graphkiln_backend.graph.errors import ConversionError
from graphkiln_backend.graph.preprocess import Letterbox, Preprocess
from graphkiln_backend.graph.task import Detection
from graphkiln_converters.detection.candidates import DETECTION
from graphkiln_converters.detection.library import LibraryPipeline
from graphkiln_converters.detection.one_stage import ByLevel, Ssd
from graphkiln_converters.detection.two_stage import TwoStage
from graphkiln_converters.sources.base import InputSpec, SourceOptions, described
from graphkiln_converters.sources.pytorch import TorchModel, freeze
from graphkiln_converters.sources.torchvision_heads import build_model
from graphkiln_converters.torch_libraries import import_torchvision

torchvision = import_torchvision()
_STRIDE = 32
"""Pixels of the input for one of the coarsest features that all of these models share."""


def list_detectors() -> list[str]:
    """The detectors of torchvision."""
    names: list[str] = torchvision.models.list_models(module=torchvision.models.detection)
    return names


def open_detector(location: str, options: SourceOptions) -> TorchModel:
    """Opens a detector with random, published or own weights.

    Raises:
        ConversionError: The weights are not its own, or the size fits no image.
    """
    model, classes, names = build_model(location, options)
    transform = model.transform
    size = _size(transform, options)
    freeze(model)
    return TorchModel(
        module=detector_module(model, size).eval(),
        reference=LibraryPipeline(model, _most(model)).eval(),
        description=described(f"torchvision:{location}", options),
        libraries=("torch", "torchvision"),
        inputs=(InputSpec(name="image", shape=(3, *size)),),
        preprocess=_preprocess(transform, size),
        labels=names,
        classes=classes,
        task=_task(model),
    )


def detector_module(model: Any, size: tuple[int, int]) -> torch.nn.Module:
    """A detector of torchvision as a module of batches of one size.

    Raises:
        ConversionError: It is of a kind that is not known.
    """
    kinds = torchvision.models.detection
    if isinstance(model, kinds.ssd.SSD):
        return Ssd(model, size)
    if isinstance(model, kinds.retinanet.RetinaNet | kinds.fcos.FCOS):
        return ByLevel(model, size)
    if isinstance(model, kinds.faster_rcnn.FasterRCNN):
        return TwoStage(model, size)
    raise ConversionError(
        f"how torchvision's {type(model).__name__} detects is not known",
        hint="wrap it in a module that returns boxes, scores, classes and counts: python:FILE:FACTORY --task detection",
    )


def _most(model: Any) -> int:
    return int(getattr(model, "roi_heads", model).detections_per_img)


def _task(model: Any) -> Detection:
    heads = getattr(model, "roi_heads", None)
    return replace(
        DETECTION,
        masks="masks" if heads and heads.has_mask() else None,
        keypoints="keypoints" if heads and heads.has_keypoint() else None,
    )


def _size(transform: Any, options: SourceOptions) -> tuple[int, int]:
    """`(height, width)` of the input: the requested one, or the model's usual one as a square.

    Raises:
        ConversionError: It is not that of an image, or no multiple of the stride.
    """
    if shape := options.shapes.get(""):
        if len(shape) != 3 or shape[0] != 3:
            raise ConversionError(f"a detector takes images, --shape gives {list(shape)}", hint="--shape 3x640x640")
        height, width = shape[1:]
    elif transform.fixed_size:
        width, height = transform.fixed_size
    else:
        height = width = -(-int(transform.min_size[-1]) // _STRIDE) * _STRIDE
    if not transform.fixed_size and (height % _STRIDE or width % _STRIDE):
        raise ConversionError(
            f"torchvision pads images to multiples of {_STRIDE} pixels, --shape gives {height}x{width}",
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
