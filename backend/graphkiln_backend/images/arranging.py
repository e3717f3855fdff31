"""From a decoded image in its colors to a sample: resized, cropped or padded, normalized."""

from __future__ import annotations

import numpy as np
from PIL import Image

from graphkiln_backend.graph.dtypes import AnyArray
from graphkiln_backend.graph.errors import InvalidInput
from graphkiln_backend.graph.preprocess import Preprocess

_MOST_PIXELS = 1 << 28

_FILTERS = {
    "nearest": Image.Resampling.NEAREST,
    "box": Image.Resampling.BOX,
    "bilinear": Image.Resampling.BILINEAR,
    "hamming": Image.Resampling.HAMMING,
    "bicubic": Image.Resampling.BICUBIC,
    "lanczos": Image.Resampling.LANCZOS,
}


def arrange(image: Image.Image, spec: Preprocess, name: str) -> AnyArray:
    """One sample (no batch dimension) of the spec's layout and dtype.

    Args:
        image: Upright, in the spec's mode: RGB, or L.
        spec: What to do with it.
        name: Of the image, for messages.

    Raises:
        InvalidInput: It would become too large on its way.
    """
    height, width = spec.resized(image.height, image.width)
    if height * width > _MOST_PIXELS:  # an image of one row can be resized to any width
        raise InvalidInput(f"{name} is too long and narrow: it would be resized to {width}x{height}")
    if (height, width) != (image.height, image.width):
        image = image.resize((width, height), _FILTERS[spec.interpolation])
    return _place(image, spec)


def _place(image: Image.Image, spec: Preprocess) -> AnyArray:
    """Crops or pads a resized image, and normalizes it."""
    box = spec.cropped(image.height, image.width)
    if box == (0, 0, *image.size):
        return _normalize(image, spec)
    if spec.letterbox is None:
        return _normalize(image.crop(box), spec)
    left, top, right, bottom = box
    if spec.letterbox.padding is not None:
        canvas = Image.new(image.mode, (right - left, bottom - top), (spec.letterbox.padding,) * spec.channels)
        canvas.paste(image, (-left, -top))
        return _normalize(canvas, spec)
    inner = _normalize(image, spec)
    axes = (1, 2) if spec.layout == "CHW" else (0, 1)
    widths = [(0, 0)] * 3
    widths[axes[0]], widths[axes[1]] = (-top, bottom - image.height), (-left, right - image.width)
    return np.pad(inner, widths)


def _normalize(image: Image.Image, spec: Preprocess) -> AnyArray:
    pixels = np.asarray(image, dtype=np.uint8).reshape(image.height, image.width, spec.channels)
    return spec.normalize(pixels[..., ::-1] if spec.color == "BGR" else pixels)
