"""Drawings of detections and segments: boxes with labels, masks, keypoints and class maps.

Line widths and font sizes are proportional to the size of the image.
"""

from __future__ import annotations

import colorsys
import math
import unicodedata
from collections.abc import Sequence
from dataclasses import astuple
from typing import TYPE_CHECKING

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from graphkiln_backend.images.decoding import to_color

if TYPE_CHECKING:
    from graphkiln_client import Detection, SegmentedImage

Color = tuple[int, int, int]

_GOLDEN_RATIO = 0.618034
_MASK_OPACITY = 0.45
_BACKGROUNDS = ("", "background", "none", "nothing", "other", "unlabeled", "void")


def color_of(index: int) -> Color:
    """Return the color of a class, with hues in steps of the golden ratio, so that consecutive classes differ most."""
    red, green, blue = colorsys.hsv_to_rgb((0.02 + index * _GOLDEN_RATIO) % 1, 0.85, 0.95)
    return round(255 * red), round(255 * green), round(255 * blue)


def draw_detections(image: Image.Image, detections: Sequence[Detection]) -> Image.Image:
    """Draw boxes, labels, masks and keypoints into a copy of an image, the best detections on top.

    Args:
        image: Upright image.
        detections: Best first; those with infinite or NaN boxes are skipped.
    """
    detections = [found for found in detections if all(map(math.isfinite, astuple(found.box)))]
    pixels = np.asarray(to_color(image, "RGB")).copy()
    for found in reversed(detections):
        if found.mask is not None:
            _tint(pixels, found.mask.pixels(), color_of(found.index))
    drawn = Image.fromarray(pixels)
    canvas = ImageDraw.Draw(drawn)
    line, font = _line(drawn), _font(drawn)
    for found in reversed(detections):
        box = found.box
        edges = (box.x1, box.y1, max(box.x1, box.x2 - 1), max(box.y1, box.y2 - 1))
        canvas.rectangle(edges, outline=color_of(found.index), width=line)
        if found.keypoints is not None:
            _draw_points(canvas, found.keypoints, 2 * line)
    for found in reversed(detections):
        text = f"{_named(found.label, found.index)} {found.score:.2f}"
        _draw_label(canvas, drawn.size, text, (found.box.x1, found.box.y1), color_of(found.index), font)
    return drawn


def draw_segments(image: Image.Image, segmented: SegmentedImage) -> Image.Image:
    """Tint a copy of an image by the class of each pixel except the background, and add a legend."""
    pixels = np.asarray(to_color(image, "RGB")).copy()
    shown = [index for index in segmented.present if not _is_background(segmented, index)]
    for index in shown:
        _tint(pixels, segmented.classes == index, color_of(index))
    drawn = Image.fromarray(pixels)
    canvas, font = ImageDraw.Draw(drawn), _font(drawn)
    top = 0.0
    for index in shown:
        text = f"{_named(segmented.label(index), index)} {100 * segmented.share(index):.0f} %"
        top = _draw_label(canvas, drawn.size, text, (0, top), color_of(index), font, above=False)
    return drawn


def _is_background(segmented: SegmentedImage, index: int) -> bool:
    """Return true for the first class, unless it has a name that is not one of a background."""
    return index == 0 and segmented.label(0).strip("_ ").lower() in _BACKGROUNDS


def _tint(
    pixels: np.ndarray[tuple[int, ...], np.dtype[np.uint8]],
    mask: np.ndarray[tuple[int, ...], np.dtype[np.bool_]],
    color: Color,
) -> None:
    mixed = pixels[mask] * (1 - _MASK_OPACITY) + np.array(color) * _MASK_OPACITY
    pixels[mask] = mixed.round().astype(np.uint8)


def _line(image: Image.Image) -> int:
    return max(2, round(max(image.size) / 320))


def _font(image: Image.Image) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    return ImageFont.load_default(size=max(11, round(max(image.size) / 32)))


def _draw_label(
    canvas: ImageDraw.ImageDraw,
    size: tuple[int, int],
    text: str,
    corner: tuple[float, float],
    color: Color,
    font: ImageFont.FreeTypeFont | ImageFont.ImageFont,
    *,
    above: bool = True,
) -> float:
    """Draw a label on a plate above a corner, or below if there is no room; return its lower edge."""
    text = _plain(text)
    left, top, right, bottom = canvas.textbbox((0, 0), text, font=font)
    pad = max(1, (bottom - top) // 5)
    width, height = right - left + 2 * pad, bottom - top + 2 * pad
    y = corner[1] - height if above and corner[1] >= height else corner[1]
    x = max(0, min(corner[0], size[0] - width))
    y = max(0, min(y, size[1] - height))
    canvas.rectangle((x, y, x + width - 1, y + height - 1), fill=color)
    light = 0.299 * color[0] + 0.587 * color[1] + 0.114 * color[2] > 140
    canvas.text((x + pad - left, y + pad - top), text, fill=(0, 0, 0) if light else (255, 255, 255), font=font)
    return y + height


def _named(label: str, index: int) -> str:
    """Return a drawable label, or the number of its class."""
    text = _plain(label)
    return text if text.strip("? ") else str(index)


def _plain(text: str) -> str:
    """Replace characters that Pillow's built-in font lacks, which has only ASCII."""
    parts = unicodedata.normalize("NFKD", text)
    return "".join(char for char in parts if not unicodedata.combining(char)).encode("ascii", "replace").decode()


def _draw_points(
    canvas: ImageDraw.ImageDraw, points: np.ndarray[tuple[int, ...], np.dtype[np.float64]], radius: int
) -> None:
    for x, y, score in points:
        if score > 0 and math.isfinite(x + y):
            canvas.ellipse((x - radius, y - radius, x + radius, y + radius), fill=(255, 255, 255), outline=(0, 0, 0))
