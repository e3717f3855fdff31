"""How images get into transformers' detectors, segmenters and depth estimators, as their image processors do it."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from graphkiln_backend.graph.preprocess import Interpolation, Letterbox, Preprocess

RESAMPLING: dict[int, Interpolation] = {
    0: "nearest",
    1: "lanczos",
    2: "bilinear",
    3: "bicubic",
    4: "box",
    5: "hamming",
}
"""Source: `PIL.Image.Resampling`."""
_STRIDE = 32
_INEXPRESSIBLE = ("ZoeDepthImageProcessorPil",)
"""Processors that pad with mirrored images."""
_PADS_AROUND = "Sapiens2ImageProcessor"


def fitted_size(config: Any, processor: Any) -> tuple[int, int]:
    """`(height, width)` that a model takes where nobody says: its own, its processor's, or a square of that."""
    own = getattr(config, "image_size", None)
    if isinstance(own, (list, tuple)):
        return int(own[0]), int(own[1])
    if crop := _crop(processor):
        return crop
    size = getattr(processor, "size", None)
    if size is not None and size.height and size.width:
        return int(size.height), int(size.width)
    side = int(own or getattr(size, "shortest_edge", None) or 800)
    side = -(-side // _STRIDE) * _STRIDE
    return side, side


def fitted_preprocess(processor: Any, size: tuple[int, int]) -> Preprocess | None:
    """How images are fitted into the one size of a detector, a segmenter or a depth estimator.

    A processor that keeps the aspect ratio gives every image a size of its own, and pads the smaller ones of a batch;
    here each is padded to the size of the input.

    Args:
        processor: Of transformers, or None where the model has none.
        size: `(height, width)` of the input in pixels.

    Returns:
        The spec, or None where none can express what the processor does.
    """
    if processor is None or _is_inexpressible(processor) or not _scales_to_one(processor):
        return None
    interpolation = RESAMPLING.get(int(getattr(processor, "resample", None) or 0))
    if interpolation is None:
        return None
    mean, std = (tuple(processor.image_mean), tuple(processor.image_std)) if processor.do_normalize else ((), ())
    flipped = bool(getattr(processor, "do_flip_channel_order", False))
    spec = Preprocess(interpolation=interpolation, mean=mean, std=std, color="BGR" if flipped else "RGB")
    return _with_geometry(spec, processor, size)


def _is_inexpressible(processor: Any) -> bool:
    """Whether a processor pads with mirrored images, or on all sides of an image."""
    name = type(processor).__name__
    return name in _INEXPRESSIBLE or (name == _PADS_AROUND and bool(processor.do_pad))


def _with_geometry(spec: Preprocess, processor: Any, size: tuple[int, int]) -> Preprocess:
    own = processor.size
    if crop := _crop(processor):
        edge = getattr(own, "shortest_edge", None)
        resize = round(edge * min(size) / min(crop)) if edge else _scaled((own.height, own.width), crop, size)
        return replace(spec, resize=resize, crop=size, crop_rounding="down")
    if own is not None and own.height and own.width and not getattr(processor, "keep_aspect_ratio", False):
        return replace(spec, resize=size)
    return replace(spec, letterbox=Letterbox(size=size, padding=None, position="top-left", rounding="down"))


def _scales_to_one(processor: Any) -> bool:
    return bool(processor.do_rescale) and math.isclose(getattr(processor, "rescale_factor", 1 / 255), 1 / 255)


def _crop(processor: Any) -> tuple[int, int] | None:
    """`(height, width)` of what a processor cuts out of the center, or None."""
    crop = getattr(processor, "crop_size", None)
    if not getattr(processor, "do_center_crop", False) or crop is None:
        return None
    return int(crop.height), int(crop.width)


def _scaled(resize: tuple[int, int], crop: tuple[int, int], size: tuple[int, int]) -> tuple[int, int]:
    height, width = (round(side * wanted / usual) for side, usual, wanted in zip(resize, crop, size, strict=True))
    return height, width
