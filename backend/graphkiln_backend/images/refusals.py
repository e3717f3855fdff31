"""Errors for what is no image: they name the format where it is recognized, and a way to convert it."""

from __future__ import annotations

import errno

import numpy as np
import numpy.typing as npt
from PIL import Image

from graphkiln_backend.graph.errors import InvalidInput
from graphkiln_backend.images.formats import FORMATS, recognize, recognize_text

_KNOWN = f"known are {', '.join(FORMATS)}"


class UnknownFormat(Exception):
    """Content of no known format, or of one that is never read; `head` is its beginning."""

    def __init__(self, head: bytes) -> None:
        super().__init__()
        self.head = head


def refuse_format(name: str, head: bytes) -> InvalidInput:
    """Build the error for content of no known format; `head` is its beginning."""
    message = f"{name} is not an image in a known format"
    found = recognize(head)
    if found is None:
        return InvalidInput(message, hint=_KNOWN)
    return InvalidInput(f"{message}: it is {found.name}", hint="; ".join(filter(None, (found.way_out, _KNOWN))))


def refuse_path(name: str, error: OSError) -> InvalidInput:
    """Build the error for a file that cannot be read, or for an image that was given as text instead of a path."""
    if error.errno not in (errno.ENOENT, errno.ENAMETOOLONG):
        return InvalidInput(f"{name} cannot be decoded: {str(error) or type(error).__name__}")
    if found := recognize_text(name.encode("utf-8", "replace")):
        return InvalidInput(f"{name} is no path: it is {found.name}", hint=found.way_out)
    return InvalidInput(f"there is no file {name}")


def as_image(given: object) -> Image.Image:
    """Return a Pillow image as it is.

    Raises:
        InvalidInput: It is something else: an open file, a list of images, a tensor.
    """
    if isinstance(given, Image.Image):
        return given
    raise InvalidInput(
        f"a {type(given).__name__} is no image",
        hint="give a path, the bytes of a file (of an open one: file.read()), a Pillow image, or uint8 pixels; "
        "several images with classify_many and its like",
    )


def check_pixels(pixels: npt.NDArray[np.uint8], name: str) -> npt.NDArray[np.uint8]:
    """Return uint8 pixels `[height, width]` or `[height, width, 3 or 4]` as they are.

    Raises:
        InvalidInput: They have another shape or type.
    """
    fits = pixels.dtype == np.uint8 and (pixels.ndim == 2 or (pixels.ndim == 3 and pixels.shape[2] in (3, 4)))
    if not fits or not pixels.size:
        raise InvalidInput(f"expected uint8 pixels [height, width, 3], got {pixels.dtype}{list(pixels.shape)} ({name})")
    return pixels
