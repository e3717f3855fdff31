"""Images of any mode as models see them: colors or gray of 8 bits."""

from __future__ import annotations

import numpy as np
from PIL import Image

from graphkiln_backend.graph.dtypes import AnyArray

# Scaled at once: in between, a pixel takes 24 bytes, and an image may have 178 million.
_STRIP_PIXELS = 1 << 20


def to_color(image: Image.Image, color: str) -> Image.Image:
    """An image as models see it: `RGB` (also for `BGR`), or gray for `L`; 16 bits are scaled, alpha is left out."""
    mode = "L" if color == "L" else "RGB"
    if image.mode.startswith("I;16") or image.mode in ("I", "F"):
        image = _scale(image)
    if image.mode == "P" and "transparency" in image.info:
        image = image.convert("RGBA")  # the same colors in the end; without it Pillow warns
    return image if image.mode == mode else image.convert(mode)


def _scale(image: Image.Image) -> Image.Image:
    """Gray of 16 bits as gray of 8. Pillow clips instead of scaling: nearly all pixels would turn white."""
    pixels, rows = np.asarray(image), max(1, _STRIP_PIXELS // image.width)
    strips = [_round(pixels[top : top + rows]) for top in range(0, image.height, rows)]
    return Image.fromarray(np.concatenate(strips))


def _round(deep: AnyArray) -> AnyArray:
    rounded: AnyArray = (deep.astype(np.float64) / 257).clip(0, 255).round().astype(np.uint8)
    return rounded
