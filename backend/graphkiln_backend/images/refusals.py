"""What to say of what cannot be read as an image: what it is, as far as that can be told, and what to do."""

from __future__ import annotations

import errno

import numpy as np
import numpy.typing as npt
from PIL import Image

from graphkiln_backend.graph.errors import InvalidInput
from graphkiln_backend.images.formats import FORMATS
from graphkiln_backend.images.other_formats import recognize, recognize_text

_KNOWN = f"known are {', '.join(FORMATS)}"


class UnknownFormat(Exception):
    """Content that is of no known format, or that shall not be read.

    Args:
        head: How it begins.
    """

    def __init__(self, head: bytes) -> None:
        super().__init__()
        self.head = head


def refuse_format(name: str, head: bytes) -> InvalidInput:
    """The error of content that is of no known format.

    Args:
        name: Of the image, for the message.
        head: How the content begins.
    """
    said = f"{name} is not an image in a known format"
    found = recognize(head)
    if found is None:
        return InvalidInput(said, hint=_KNOWN)
    return InvalidInput(f"{said}: it is {found.name}", hint="; ".join(filter(None, (found.way_out, _KNOWN))))


def refuse_path(name: str, error: OSError) -> InvalidInput:
    """The error of a file that cannot be read, or of what was given in its place: an image as text.

    Args:
        name: Of the file, or how the text begins.
        error: What became of it.
    """
    if error.errno not in (errno.ENOENT, errno.ENAMETOOLONG):
        return InvalidInput(f"{name} cannot be decoded: {str(error) or type(error).__name__}")
    if found := recognize_text(name.encode("utf-8", "replace")):
        return InvalidInput(f"{name} is no path: it is {found.name}", hint=found.way_out)
    return InvalidInput(f"there is no file {name}")


def as_image(given: object) -> Image.Image:
    """What was given as a Pillow image.

    Raises:
        InvalidInput: It is none: an open file, a list of images, a tensor.
    """
    if isinstance(given, Image.Image):
        return given
    raise InvalidInput(
        f"a {type(given).__name__} is no image",
        hint="give a path, the bytes of a file (of an open one: file.read()), a Pillow image, or uint8 pixels; "
        "several images with classify_many and its like",
    )


def check_pixels(pixels: npt.NDArray[np.uint8], name: str) -> npt.NDArray[np.uint8]:
    """Pixels as they are, `[height, width]` or `[height, width, 3 or 4]`.

    Args:
        pixels: What was given.
        name: Of the image, for the message.

    Raises:
        InvalidInput: They are of another shape or type.
    """
    fits = pixels.dtype == np.uint8 and (pixels.ndim == 2 or (pixels.ndim == 3 and pixels.shape[2] in (3, 4)))
    if not fits or not pixels.size:
        raise InvalidInput(f"expected uint8 pixels [height, width, 3], got {pixels.dtype}{list(pixels.shape)} ({name})")
    return pixels
