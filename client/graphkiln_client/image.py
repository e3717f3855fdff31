"""From a picture in any usual form to one sample of an input tensor, by the published preprocess spec."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageOps, UnidentifiedImageError

from graphkiln_backend.graph.dtypes import AnyArray
from graphkiln_backend.graph.errors import InvalidInput
from graphkiln_backend.graph.preprocess import Preprocess
from graphkiln_client.fetching import fetch

Picture = str | Path | bytes | Image.Image | npt.NDArray[np.uint8]
"""A file path or `https://` URL, an encoded picture, a Pillow image, or uint8 pixels.

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


def describe(picture: Picture) -> str:
    """What to call a picture in messages and results: its path, or its kind and size."""
    if isinstance(picture, str | Path):
        return str(picture)
    if isinstance(picture, bytes):
        return f"{len(picture)} bytes"
    size = picture.size if isinstance(picture, Image.Image) else picture.shape
    return f"{type(picture).__name__}{size}"


def open_picture(picture: Picture, *, fetch_timeout_s: float | None = None) -> Image.Image:
    """Decodes a picture and turns it upright by its EXIF orientation.

    Args:
        picture: The picture.
        fetch_timeout_s: Seconds that fetching a URL may take; None where URLs are not allowed.

    Raises:
        InvalidInput: Not a picture, damaged, missing or too large; the message names it.
    """
    name = describe(picture)
    try:
        if isinstance(picture, Image.Image):
            image = picture
        elif isinstance(picture, np.ndarray):
            image = Image.fromarray(_checked_pixels(picture, name))
        else:
            image = Image.open(_file(picture, fetch_timeout_s))
        _load(image)
        return ImageOps.exif_transpose(image)
    except UnidentifiedImageError as error:
        raise InvalidInput(f"{name} is not an image in a known format", hint="send JPEG, PNG or WebP") from error
    except FileNotFoundError as error:
        raise InvalidInput(f"there is no file {name}") from error
    except Image.DecompressionBombError as error:
        raise InvalidInput(f"{name} is too large to decode safely: {error}") from error
    except (OSError, ValueError, SyntaxError) as error:
        raise InvalidInput(f"{name} cannot be decoded: {error}") from error


def _load(image: Image.Image) -> None:
    """Decodes; a file that cannot be decoded is closed, as Pillow closes one that can."""
    try:
        image.load()
    except BaseException:
        image.close()
        raise


def _file(picture: str | Path | bytes, fetch_timeout_s: float | None) -> str | Path | io.BytesIO:
    if isinstance(picture, bytes):
        return io.BytesIO(picture)
    if isinstance(picture, str) and picture.startswith(("https://", "http://")):
        if fetch_timeout_s is None:
            raise InvalidInput(f"{picture} is a URL", hint="to fetch pictures, give Client(fetch_urls=True)")
        return io.BytesIO(fetch(picture, fetch_timeout_s))
    return picture


def load_sample(picture: Picture, spec: Preprocess, *, fetch_timeout_s: float | None = None) -> AnyArray:
    """Turns a picture into one sample (no batch dimension) of the spec's layout and dtype.

    Args:
        picture: The picture.
        spec: What to do with it.
        fetch_timeout_s: Seconds that fetching a URL may take; None where URLs are not allowed.

    Raises:
        InvalidInput: The picture cannot be read.
    """
    image = _convert(open_picture(picture, fetch_timeout_s=fetch_timeout_s), spec.color)
    height, width = spec.resized(image.height, image.width)
    if (height, width) != (image.height, image.width):
        image = image.resize((width, height), _FILTERS[spec.interpolation])
    box = spec.cropped(height, width)
    if box != (0, 0, width, height):
        image = image.crop(box)
    pixels = np.asarray(image, dtype=np.uint8).reshape(image.height, image.width, spec.channels)
    return spec.normalise(pixels[..., ::-1] if spec.color == "BGR" else pixels)


def _convert(image: Image.Image, color: str) -> Image.Image:
    mode = "L" if color == "L" else "RGB"
    if image.mode.startswith("I;16") or image.mode in ("I", "F"):
        # Pillow clips instead of scaling: 16-bit pixels would all turn white.
        pixels = np.asarray(image, dtype=np.float64)
        image = Image.fromarray((pixels / 257).clip(0, 255).round().astype(np.uint8))
    if image.mode == "P" and "transparency" in image.info:
        image = image.convert("RGBA")  # the same colours in the end; without it Pillow warns
    return image if image.mode == mode else image.convert(mode)


def _checked_pixels(pixels: npt.NDArray[np.uint8], name: str) -> npt.NDArray[np.uint8]:
    fits = pixels.dtype == np.uint8 and (pixels.ndim == 2 or (pixels.ndim == 3 and pixels.shape[2] in (3, 4)))
    if not fits or not pixels.size:
        raise InvalidInput(f"expected uint8 pixels [height, width, 3], got {pixels.dtype}{list(pixels.shape)} ({name})")
    return pixels
