"""Convert an image into one sample of an input tensor, by the published preprocess spec.

`prepare` runs all steps: decode with Pillow, apply the EXIF orientation, convert to RGB or gray, resize, crop or pad,
normalize. Every error names the image.
"""

from __future__ import annotations

import errno
import io
import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
import numpy.typing as npt
from PIL import ExifTags, Image, UnidentifiedImageError

from graphkiln_backend.graph.dtypes import AnyArray
from graphkiln_backend.graph.errors import InvalidInput
from graphkiln_backend.graph.files import GIB, open_regular
from graphkiln_backend.graph.preprocess import Preprocess
from graphkiln_backend.images.formats import FORMATS, HEAD_BYTES, recognize, recognize_text

# A file path, an encoded image, a Pillow image, or uint8 pixels: `[height, width]` or `[height, width, 3 or 4]`.
ImageLike = str | Path | bytes | Image.Image | npt.NDArray[np.uint8]

# Number of pixels -> a context that is held while they are in memory.
PixelBudget = Callable[[int], AbstractContextManager[object]]

_FILE_LIMIT = GIB
_LONGEST_PATH = 4096  # longer ones are truncated in messages. Source: Linux, PATH_MAX.
_MOST_PIXELS_OF_ARRANGING = 1 << 28
_STRIP_PIXELS = 1 << 20  # scaled in one step: a pixel takes 24 bytes meanwhile, and an image may have 178 million
_GRAYS = range(1 << 16)  # scaled to 8 bits, by Pillow's mode `I`

_FILTERS = {
    "nearest": Image.Resampling.NEAREST,
    "box": Image.Resampling.BOX,
    "bilinear": Image.Resampling.BILINEAR,
    "hamming": Image.Resampling.HAMMING,
    "bicubic": Image.Resampling.BICUBIC,
    "lanczos": Image.Resampling.LANCZOS,
}

# Orientation -> transposition to upright. Source: `PIL.ImageOps.exif_transpose`, which fails if other EXIF data cannot
# be written back.
_ROTATIONS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
_SIDEWAYS = (5, 6, 7, 8)  # orientations in which rows become columns. Source: Exif 2.32, tag 0x0112.
_METADATA = ("exif", "Raw profile type exif", "XML:com.adobe.xmp", "xmp")  # Pillow's place of the orientation
# Places of an orientation in a PNG; some may follow the pixels, so that Pillow must decode them.
_PNG_METADATA = (b"eXIf", b"Raw profile type exif", b"XML:com.adobe.xmp")

# Limit of libjpeg-turbo's tools (`djpeg -maxscans`) and NVIDIA DALI. Programs write ten to sixty scans.
_MOST_SCANS = 500
_MOST_PIXELS = 1 << 32  # total over all scans: 24 scans of the largest image
# End of a scan's data, in which 0xff is followed by 0 or a restart marker.
_MARKER = re.compile(rb"\xff+([^\x00\xd0-\xd7\xff])")
_SCAN, _END = 0xDA, 0xD9
_WITHOUT_LENGTH = (0x01, 0xD8)  # markers without a length. Source: ITU T.81, table B.1.


@dataclass(frozen=True, slots=True)
class Prepared:
    """A sample, and the size of its image.

    Attributes:
        sample: Tensor in the spec's layout and dtype, without the batch.
        height: Height of the upright image in pixels.
        width: Width of the upright image in pixels.
    """

    sample: AnyArray
    height: int
    width: int


def load_sample(image: ImageLike, spec: Preprocess, *, budget: PixelBudget = nullcontext) -> AnyArray:
    """Convert an image into one sample (no batch dimension) of the spec's layout and dtype.

    Args:
        image: The image.
        spec: Preprocessing.
        budget: As for `prepare`.

    Raises:
        InvalidInput: The image cannot be read.
    """
    return prepare(image, spec, budget=budget).sample


def prepare(image: ImageLike, spec: Preprocess, *, name: str = "", budget: PixelBudget = nullcontext) -> Prepared:
    """Convert an image into one sample, and keep the size of the image.

    Args:
        image: The image.
        spec: Preprocessing.
        name: Name of the image in errors; default: from `describe`.
        budget: Limits the pixels in memory during decoding and resizing, see `images.encoded`.

    Raises:
        InvalidInput: The image cannot be read.
    """
    with ExitStack() as held:

        def claim(width: int, height: int) -> None:
            resized_height, resized_width = spec.resized(height, width)
            held.enter_context(budget(max(width * height, resized_width * resized_height)))

        name = name or describe(image)
        with _translated_errors(name):  # rare modes have no conversion to gray
            decoded = to_color(_open(image, claim), spec.color)
        return Prepared(arrange(decoded, spec, name), decoded.height, decoded.width)


def describe(image: ImageLike) -> str:
    """Describe an image for messages and results: its path, or its kind and size."""
    if isinstance(image, str | Path):
        text = str(image)
        return text if len(text) <= _LONGEST_PATH else f"{text[:40]}... ({len(text)} characters)"
    if isinstance(image, bytes):
        return f"{len(image)} bytes"
    size = image.size if isinstance(image, Image.Image) else getattr(image, "shape", "")
    return f"{type(image).__name__}{size}"


def open_image(image: ImageLike) -> Image.Image:
    """Decode an image (of several frames, the first) and apply its EXIF orientation.

    Raises:
        InvalidInput: The file is not an image of a known format, damaged, missing or too large.
    """
    with _translated_errors(describe(image)):
        return _open(image)


def _claim_nothing(width: int, height: int, /) -> None:
    """Claim no memory budget."""


def _open(image: ImageLike, claim: Callable[[int, int], None] = _claim_nothing) -> Image.Image:
    """Decode like `open_image`, with the decoder's errors; `claim` gets width and height before decoding."""
    if isinstance(image, str | Path):
        with open_regular(image, _FILE_LIMIT) as file:
            return _decode(file, claim)
    if isinstance(image, np.ndarray):
        return Image.fromarray(_check_pixels(image, describe(image)))
    if isinstance(image, bytes):
        return _decode(io.BytesIO(image), claim)
    if not isinstance(image, Image.Image):
        raise InvalidInput(
            f"a {type(image).__name__} is not an image",
            hint="give a path, the bytes of a file (of an open one: file.read()), a Pillow image, or uint8 pixels; "
            "several images with classify_many and its like",
        )
    upright = _upright(image)
    return upright.copy() if upright is image else upright  # the caller may modify it


def _decode(file: BinaryIO, claim: Callable[[int, int], None]) -> Image.Image:
    """Decode upright, without a copy of the pixels (up to 700 MB) when the file is closed."""
    with _opened(file) as image:
        check_scans(image, file)
        claim(image.width, image.height)
        return _upright(image)


@contextmanager
def _opened(file: BinaryIO) -> Iterator[Image.Image]:
    """Open an image and read its header.

    Raises:
        _UnknownFormat: The format is unknown, or the header is damaged.
    """
    try:
        image = Image.open(file, formats=FORMATS)
    except UnidentifiedImageError as error:
        file.seek(0)
        raise _UnknownFormat(file.read(HEAD_BYTES)) from error
    with image:
        yield image


def _upright(image: Image.Image) -> Image.Image:
    """Apply the orientation of an image."""
    if image.format == "EPS":  # a program, which must not be run
        raise _UnknownFormat(b"%!PS")
    image.load()
    _check_range(image)
    turn = _ROTATIONS.get(_orientation(image))
    if turn is None:
        return image
    turned = image.transpose(turn)
    for key in _METADATA:  # otherwise the next reader would apply it again
        turned.info.pop(key, None)
    return turned


def _check_range(image: Image.Image) -> None:
    """Raise `ValueError` for 32-bit pixels of unknown range, which cannot be scaled."""
    # Older versions of Pillow read 16-bit PNGs as 32-bit pixels; TIFFs have other ranges.
    has_16_bits = image.format != "TIFF" and image.mode == "I" and all(each in _GRAYS for each in image.getextrema())
    if image.mode in ("F", "I") and not has_16_bits:
        raise ValueError("the range of its 32-bit pixels is unknown; save it with 8 or 16 bits a channel")


def _orientation(image: Image.Image) -> int:
    """Read the EXIF orientation; 1 (upright) for damaged data, like other programs."""
    try:
        return int(image.getexif().get(ExifTags.Base.Orientation, 1))
    except Exception:  # noqa: BLE001 - damaged data make Pillow fail in any way
        return 1


class _UnknownFormat(Exception):
    """Content of an unknown or unsupported format; `head` is its beginning."""

    def __init__(self, head: bytes) -> None:
        super().__init__()
        self.head = head

    def describe(self, name: str) -> InvalidInput:
        """Name the format, if it is recognized, and how to convert it."""
        message, known = f"{name} is not an image in a known format", f"known are {', '.join(FORMATS)}"
        found = recognize(self.head)
        if found is None:
            return InvalidInput(message, hint=known)
        return InvalidInput(f"{message}: it is {found.name}", hint="; ".join(filter(None, (found.hint, known))))


@contextmanager
def _translated_errors(name: str) -> Iterator[None]:
    """Translate errors of Pillow and the file system into `InvalidInput` with the image's name."""
    try:
        yield
    except InvalidInput:
        raise
    except _UnknownFormat as error:
        raise error.describe(name) from error
    except OSError as error:
        raise _refuse_path(name, error) from error
    except MemoryError as error:
        raise InvalidInput(f"there is not enough memory to decode {name}") from error
    except Image.DecompressionBombError as error:
        hint = "make it smaller first: magick FILE -resize 8000x8000 OUT.jpg"
        raise InvalidInput(f"{name} is too large to decode safely: {error}", hint=hint) from error
    except Exception as error:  # Pillow's decoders raise any exception for damaged files
        raise InvalidInput(f"{name} cannot be decoded: {str(error) or type(error).__name__}") from error


def _refuse_path(name: str, error: OSError) -> InvalidInput:
    """Make the error for an unreadable file, or for image data given as text."""
    if error.errno not in (errno.ENOENT, errno.ENAMETOOLONG):
        return InvalidInput(f"{name} cannot be decoded: {str(error) or type(error).__name__}")
    if found := recognize_text(name.encode("utf-8", "replace")):
        return InvalidInput(f"{name} is not a path: it is {found.name}", hint=found.hint)
    return InvalidInput(f"there is no file {name}")


def _check_pixels(pixels: npt.NDArray[np.uint8], name: str) -> npt.NDArray[np.uint8]:
    """Check that pixels are uint8 `[height, width]` or `[height, width, 3 or 4]`.

    Raises:
        InvalidInput: They have another shape or type.
    """
    fits = pixels.dtype == np.uint8 and (pixels.ndim == 2 or (pixels.ndim == 3 and pixels.shape[2] in (3, 4)))
    if not fits or not pixels.size:
        raise InvalidInput(f"expected uint8 pixels [height, width, 3], got {pixels.dtype}{list(pixels.shape)} ({name})")
    return pixels


def check_scans(image: Image.Image, file: BinaryIO) -> None:
    """Refuse a progressive JPEG with too many scans, which could take minutes to hours to decode.

    Pillow has no limit.

    Args:
        image: Image whose header was read.
        file: Its file; the position is restored.

    Raises:
        ValueError: It has too many scans.

    Source: "Two Issues with the JPEG Standard", LJT-01-003 (libjpeg-turbo).
    """
    if "progressive" not in image.info or image.format not in ("JPEG", "MPO"):
        return
    place = file.tell()
    file.seek(0)
    scans = count_scans(file.read())
    file.seek(place)
    if scans > _MOST_SCANS or scans * image.width * image.height > _MOST_PIXELS:
        raise ValueError(
            f"it would take too long: {scans} scans of {image.width}x{image.height} pixels; save it without them"
        )


def count_scans(jpeg: bytes) -> int:
    """Count the scans of the first image of a file, up to the end of a damaged one."""
    scans = place = 0
    while found := _MARKER.search(jpeg, place):
        place, marker = found.end(), found[1][0]
        if marker == _END:
            break
        scans += marker == _SCAN
        if marker not in _WITHOUT_LENGTH:
            place += int.from_bytes(jpeg[place : place + 2], "big")
    return scans


def upright_size(content: bytes) -> tuple[int, int]:
    """Height and width of an upright image, from its header if possible.

    Args:
        content: An encoded image.

    Raises:
        InvalidInput: As for `open_image`; damage after the header is not detected.
    """
    with _translated_errors(describe(content)), _opened(io.BytesIO(content)) as image:
        return (image.width, image.height) if _is_sideways(image, content) else (image.height, image.width)


def _is_sideways(image: Image.Image, content: bytes) -> bool:
    """True if the orientation swaps height and width."""
    if image.format == "TIFF" or (image.format == "PNG" and not any(map(content.__contains__, _PNG_METADATA))):
        return False  # Pillow swaps the size of TIFFs itself
    return _orientation(image) in _SIDEWAYS


def count_pixels(content: bytes) -> int:
    """Count the pixels of an encoded image from its header; 0 if `open_image` would refuse it."""
    with suppress(Exception), Image.open(io.BytesIO(content), formats=FORMATS) as image:  # any exception is possible
        return image.width * image.height
    return 0


def to_color(image: Image.Image, color: str) -> Image.Image:
    """Convert to `RGB` (also for `BGR`), or gray for `L`; 16 bits are scaled, alpha is dropped."""
    mode = "L" if color == "L" else "RGB"
    if image.mode.startswith("I;16") or image.mode in ("I", "F"):
        image = _scale(image)
    if image.mode == "P" and "transparency" in image.info:
        image = image.convert("RGBA")  # same colors; avoids a warning of Pillow
    return image if image.mode == mode else image.convert(mode)


def _scale(image: Image.Image) -> Image.Image:
    """Scale 16-bit gray to 8 bits; Pillow would clip nearly all pixels to white."""
    pixels, rows = np.asarray(image), max(1, _STRIP_PIXELS // image.width)
    scaled = np.empty(pixels.shape, np.uint8)
    for top in range(0, image.height, rows):
        strip = pixels[top : top + rows].astype(np.float64)
        scaled[top : top + rows] = (strip / 257).clip(0, 255).round()
    return Image.fromarray(scaled)


def arrange(image: Image.Image, spec: Preprocess, name: str) -> AnyArray:
    """Resize, crop or pad and normalize to one sample (no batch dimension) of the spec's layout and dtype.

    Args:
        image: Upright image in the spec's mode: RGB, or L.
        spec: Preprocessing.
        name: Name of the image in messages.

    Raises:
        InvalidInput: The resized image would be too large.
    """
    height, width = spec.resized(image.height, image.width)
    if height * width > _MOST_PIXELS_OF_ARRANGING:  # an image of one row may be resized to any width
        raise InvalidInput(f"{name} is too long and narrow: it would be resized to {width}x{height}")
    if (height, width) != (image.height, image.width):
        image = image.resize((width, height), _FILTERS[spec.interpolation])
    return _place(image, spec)


def _place(image: Image.Image, spec: Preprocess) -> AnyArray:
    """Crop or pad a resized image, and normalize it."""
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
