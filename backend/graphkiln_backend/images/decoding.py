"""From an image in any usual form to one sample of an input tensor, by the published preprocess spec."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageOps, UnidentifiedImageError

from graphkiln_backend.graph.dtypes import AnyArray
from graphkiln_backend.graph.errors import InvalidInput
from graphkiln_backend.graph.preprocess import Preprocess

ImageLike = str | Path | bytes | Image.Image | npt.NDArray[np.uint8]
"""A file path, an encoded image, a Pillow image, or uint8 pixels.

Pixels are `[height, width]` or `[height, width, 3 or 4]`.
"""

_FILTERS = {
    "nearest": Image.Resampling.NEAREST,
    "box": Image.Resampling.BOX,
    "bilinear": Image.Resampling.BILINEAR,
    "hamming": Image.Resampling.HAMMING,
    "bicubic": Image.Resampling.BICUBIC,
    "lanczos": Image.Resampling.LANCZOS,
}


def describe(image: ImageLike) -> str:
    """What to call an image in messages and results: its path, or its kind and size."""
    if isinstance(image, str | Path):
        return str(image)
    if isinstance(image, bytes):
        return f"{len(image)} bytes"
    size = image.size if isinstance(image, Image.Image) else image.shape
    return f"{type(image).__name__}{size}"


def open_image(image: ImageLike) -> Image.Image:
    """Decodes an image and turns it upright by its EXIF orientation.

    Raises:
        InvalidInput: Not an image, damaged, missing or too large; the message names it.
    """
    name = describe(image)
    try:
        opened = _opened(image, name)
        _load(opened)
        return ImageOps.exif_transpose(opened)
    except UnidentifiedImageError as error:
        raise InvalidInput(f"{name} is not an image in a known format", hint="send JPEG, PNG or WebP") from error
    except FileNotFoundError as error:
        raise InvalidInput(f"there is no file {name}") from error
    except Image.DecompressionBombError as error:
        raise InvalidInput(f"{name} is too large to decode safely: {error}") from error
    except (OSError, ValueError, SyntaxError) as error:
        raise InvalidInput(f"{name} cannot be decoded: {error}") from error


def _opened(image: ImageLike, name: str) -> Image.Image:
    if isinstance(image, Image.Image):
        return image
    if isinstance(image, np.ndarray):
        return Image.fromarray(_checked_pixels(image, name))
    return Image.open(io.BytesIO(image) if isinstance(image, bytes) else image)


def _load(image: Image.Image) -> None:
    """Decodes; a file that cannot be decoded is closed, as Pillow closes one that can."""
    try:
        image.load()
    except BaseException:
        image.close()
        raise


def load_sample(image: ImageLike, spec: Preprocess) -> AnyArray:
    """Turns an image into one sample (no batch dimension) of the spec's layout and dtype.

    Args:
        image: The image.
        spec: What to do with it.

    Raises:
        InvalidInput: The image cannot be read.
    """
    decoded = _convert(open_image(image), spec.color)
    height, width = spec.resized(decoded.height, decoded.width)
    if (height, width) != (decoded.height, decoded.width):
        decoded = decoded.resize((width, height), _FILTERS[spec.interpolation])
    box = spec.cropped(height, width)
    if box != (0, 0, width, height):
        decoded = decoded.crop(box)
    pixels = np.asarray(decoded, dtype=np.uint8).reshape(decoded.height, decoded.width, spec.channels)
    return spec.normalize(pixels[..., ::-1] if spec.color == "BGR" else pixels)


def _convert(image: Image.Image, color: str) -> Image.Image:
    mode = "L" if color == "L" else "RGB"
    if image.mode.startswith("I;16") or image.mode in ("I", "F"):
        # Pillow clips instead of scaling: 16-bit pixels would all turn white.
        pixels = np.asarray(image, dtype=np.float64)
        image = Image.fromarray((pixels / 257).clip(0, 255).round().astype(np.uint8))
    if image.mode == "P" and "transparency" in image.info:
        image = image.convert("RGBA")  # the same colors in the end; without it Pillow warns
    return image if image.mode == mode else image.convert(mode)


def _checked_pixels(pixels: npt.NDArray[np.uint8], name: str) -> npt.NDArray[np.uint8]:
    fits = pixels.dtype == np.uint8 and (pixels.ndim == 2 or (pixels.ndim == 3 and pixels.shape[2] in (3, 4)))
    if not fits or not pixels.size:
        raise InvalidInput(f"expected uint8 pixels [height, width, 3], got {pixels.dtype}{list(pixels.shape)} ({name})")
    return pixels
