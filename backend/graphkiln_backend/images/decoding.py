"""Turn an image in any usual form into one sample of an input tensor, by the published preprocess spec.

`prepare` is the way of an image: opened and decoded by Pillow, turned upright, converted to RGB or gray, resized,
cropped or padded, normalized. Every error names the image.
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

# Number of pixels in memory -> a context held as long as they are.
PixelBudget = Callable[[int], AbstractContextManager[object]]

_FILE_LIMIT = GIB
_LONGEST_PATH = 4096  # of a longer one the beginning is shown. Source: Linux, PATH_MAX.
_MOST_PIXELS_OF_ARRANGING = 1 << 28
_STRIP_PIXELS = 1 << 20  # scaled at once: in between a pixel takes 24 bytes, and an image may have 178 million
_GRAYS = range(1 << 16)  # scaled to 8 bits, by Pillow's mode `I`

_FILTERS = {
    "nearest": Image.Resampling.NEAREST,
    "box": Image.Resampling.BOX,
    "bilinear": Image.Resampling.BILINEAR,
    "hamming": Image.Resampling.HAMMING,
    "bicubic": Image.Resampling.BICUBIC,
    "lanczos": Image.Resampling.LANCZOS,
}

# Orientation -> how to turn it upright. Source: `PIL.ImageOps.exif_transpose`, which fails where other data of the EXIF
# cannot be written back.
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
_METADATA = ("exif", "Raw profile type exif", "XML:com.adobe.xmp", "xmp")  # where Pillow keeps an orientation
# Where a PNG keeps an orientation; some of these may follow the pixels, and Pillow decodes them to find it.
_PNG_METADATA = (b"eXIf", b"Raw profile type exif", b"XML:com.adobe.xmp")

# Limit of libjpeg-turbo's own tools (`djpeg -maxscans`) and NVIDIA DALI. Programs write ten, careful ones some sixty.
_MOST_SCANS = 500
_MOST_PIXELS = 1 << 32  # of all scans together: 24 of the largest image that is decoded at all
# Ends the data of a scan: in them, 0xff is followed by 0 or a restart marker.
_MARKER = re.compile(rb"\xff+([^\x00\xd0-\xd7\xff])")
_SCAN, _END = 0xDA, 0xD9
_WITHOUT_LENGTH = (0x01, 0xD8)  # markers that no length follows. Source: ITU T.81, table B.1.


@dataclass(frozen=True, slots=True)
class Prepared:
    """A sample, and the size of the image that it was made from.

    Attributes:
        sample: In the spec's layout and dtype, without the batch.
        height: Height of the upright image in pixels.
        width: Width of the upright image in pixels.
    """

    sample: AnyArray
    height: int
    width: int


def load_sample(image: ImageLike, spec: Preprocess, *, budget: PixelBudget = nullcontext) -> AnyArray:
    """Turn an image into one sample (no batch dimension) of the spec's layout and dtype.

    Args:
        image: The image.
        spec: Preprocessing.
        budget: As for `prepare`.

    Raises:
        InvalidInput: The image cannot be read.
    """
    return prepare(image, spec, budget=budget).sample


def prepare(image: ImageLike, spec: Preprocess, *, name: str = "", budget: PixelBudget = nullcontext) -> Prepared:
    """Turn an image into one sample, and keep the size that answers about it are brought back to.

    Args:
        image: The image.
        spec: Preprocessing.
        name: Name of the image in errors, by default as `describe` gives it.
        budget: Holds the pixels of an encoded image while it is decoded and resized, see `images.encoded`.

    Raises:
        InvalidInput: The image cannot be read.
    """
    with ExitStack() as held:

        def claim(width: int, height: int) -> None:
            resized_height, resized_width = spec.resized(height, width)
            held.enter_context(budget(max(width * height, resized_width * resized_height)))

        name = name or describe(image)
        with _telling(name):  # a rare kind of pixels may have no way to gray
            decoded = to_color(_open(image, claim), spec.color)
        return Prepared(arrange(decoded, spec, name), decoded.height, decoded.width)


def describe(image: ImageLike) -> str:
    """Name an image in messages and results: its path, or its kind and size."""
    if isinstance(image, str | Path):
        text = str(image)
        return text if len(text) <= _LONGEST_PATH else f"{text[:40]}... ({len(text)} characters)"
    if isinstance(image, bytes):
        return f"{len(image)} bytes"
    size = image.size if isinstance(image, Image.Image) else getattr(image, "shape", "")
    return f"{type(image).__name__}{size}"


def open_image(image: ImageLike) -> Image.Image:
    """Decode an image and turn it upright by its EXIF orientation; of several, the first.

    Raises:
        InvalidInput: Not an image, in another format, damaged, missing or too large; the message names it.
    """
    with _telling(describe(image)):
        return _open(image)


def _claim_nothing(width: int, height: int, /) -> None:
    """Claim no memory budget."""


def _open(image: ImageLike, claim: Callable[[int, int], None] = _claim_nothing) -> Image.Image:
    """Decode as `open_image` does, with the decoder's own errors; `claim` gets width and height before decoding."""
    if isinstance(image, str | Path):
        with open_regular(image, _FILE_LIMIT) as file:
            return _decode(file, claim)
    if isinstance(image, np.ndarray):
        return Image.fromarray(_check_pixels(image, describe(image)))
    if isinstance(image, bytes):
        return _decode(io.BytesIO(image), claim)
    if not isinstance(image, Image.Image):
        raise InvalidInput(
            f"a {type(image).__name__} is no image",
            hint="give a path, the bytes of a file (of an open one: file.read()), a Pillow image, or uint8 pixels; "
            "several images with classify_many and its like",
        )
    upright = _upright(image)
    return upright.copy() if upright is image else upright  # the caller may go on to draw in it


def _decode(file: BinaryIO, claim: Callable[[int, int], None]) -> Image.Image:
    """Decode upright; the pixels stay when the file is closed, so that up to 700 MB need no copy."""
    with _opened(file) as image:
        check_scans(image, file)
        claim(image.width, image.height)
        return _upright(image)


@contextmanager
def _opened(file: BinaryIO) -> Iterator[Image.Image]:
    """Open an image and read its header only.

    Raises:
        _UnknownFormat: It is of another format, or its header is damaged.
    """
    try:
        image = Image.open(file, formats=FORMATS)
    except UnidentifiedImageError as error:
        file.seek(0)
        raise _UnknownFormat(file.read(HEAD_BYTES)) from error
    with image:
        yield image


def _upright(image: Image.Image) -> Image.Image:
    """Turn an image by its orientation; return itself where it needs no turn."""
    if image.format == "EPS":  # a program, not pixels: never run it
        raise _UnknownFormat(b"%!PS")
    image.load()
    _check_range(image)
    turn = _ROTATIONS.get(_orientation(image))
    if turn is None:
        return image
    turned = image.transpose(turn)
    for key in _METADATA:  # or the next reader turns it again
        turned.info.pop(key, None)
    return turned


def _check_range(image: Image.Image) -> None:
    """Raise a `ValueError` for pixels of unknown range: scaled by a guess, most would turn black or white."""
    if image.mode == "F" or (image.mode == "I" and not _has_16_bits(image)):
        raise ValueError("nothing says which of its 32-bit pixels are white; save it with 8 or 16 bits a channel")


def _has_16_bits(image: Image.Image) -> bool:
    """Return true where 32-bit pixels hold 16-bit values, as older Pillow reads PNGs; TIFFs have other ranges."""
    return image.format != "TIFF" and all(each in _GRAYS for each in image.getextrema())


def _orientation(image: Image.Image) -> int:
    """Read the EXIF orientation; 1, which is upright, where the data are damaged, as other programs do."""
    try:
        return int(image.getexif().get(ExifTags.Base.Orientation, 1))
    except Exception:  # noqa: BLE001 - damaged data make Pillow fail in any way
        return 1


class _UnknownFormat(Exception):
    """Content of no known format, or of one that is never read; `head` is its beginning."""

    def __init__(self, head: bytes) -> None:
        super().__init__()
        self.head = head

    def describe(self, name: str) -> InvalidInput:
        """Name the format where it is recognized, and a way to convert it."""
        message, known = f"{name} is not an image in a known format", f"known are {', '.join(FORMATS)}"
        found = recognize(self.head)
        if found is None:
            return InvalidInput(message, hint=known)
        return InvalidInput(f"{message}: it is {found.name}", hint="; ".join(filter(None, (found.way_out, known))))


@contextmanager
def _telling(name: str) -> Iterator[None]:
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
    except Exception as error:  # damaged files make Pillow's decoders fail in any way
        raise InvalidInput(f"{name} cannot be decoded: {str(error) or type(error).__name__}") from error


def _refuse_path(name: str, error: OSError) -> InvalidInput:
    """Build the error for a file that cannot be read, or for an image that was given as text instead of a path."""
    if error.errno not in (errno.ENOENT, errno.ENAMETOOLONG):
        return InvalidInput(f"{name} cannot be decoded: {str(error) or type(error).__name__}")
    if found := recognize_text(name.encode("utf-8", "replace")):
        return InvalidInput(f"{name} is no path: it is {found.name}", hint=found.way_out)
    return InvalidInput(f"there is no file {name}")


def _check_pixels(pixels: npt.NDArray[np.uint8], name: str) -> npt.NDArray[np.uint8]:
    """Return uint8 pixels `[height, width]` or `[height, width, 3 or 4]` as they are.

    Raises:
        InvalidInput: They have another shape or type.
    """
    fits = pixels.dtype == np.uint8 and (pixels.ndim == 2 or (pixels.ndim == 3 and pixels.shape[2] in (3, 4)))
    if not fits or not pixels.size:
        raise InvalidInput(f"expected uint8 pixels [height, width, 3], got {pixels.dtype}{list(pixels.shape)} ({name})")
    return pixels


def check_scans(image: Image.Image, file: BinaryIO) -> None:
    """Refuse a progressive JPEG whose many scans would take any decoder minutes to hours.

    Such a file repeats all of its pixels in hundreds of scans, and Pillow sets no limit.

    Args:
        image: Image of which the header was read.
        file: Its file; the position is kept.

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
    """Count the scans of the first image of a file; of a damaged one, those before its end."""
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
    """Height and width of the image that `open_image` gives, by the header: no pixels are decoded if that can be.

    Args:
        content: An encoded image.

    Raises:
        InvalidInput: As `open_image`; damage behind the header is not seen.
    """
    with _telling(describe(content)), _opened(io.BytesIO(content)) as image:
        return (image.width, image.height) if _is_sideways(image, content) else (image.height, image.width)


def _is_sideways(image: Image.Image, content: bytes) -> bool:
    """Return true where the size before decoding is that of an image on its side."""
    if image.format == "TIFF" or (image.format == "PNG" and not any(map(content.__contains__, _PNG_METADATA))):
        return False  # Pillow turns the size of TIFFs by itself
    return _orientation(image) in _SIDEWAYS


def count_pixels(content: bytes) -> int:
    """Count the pixels of an encoded image by its header, without decoding; 0 for what `open_image` refuses."""
    with suppress(Exception), Image.open(io.BytesIO(content), formats=FORMATS) as image:  # it may fail in any way
        return image.width * image.height
    return 0


def to_color(image: Image.Image, color: str) -> Image.Image:
    """Convert to `RGB` (also for `BGR`), or gray for `L`; 16 bits are scaled, alpha is left out."""
    mode = "L" if color == "L" else "RGB"
    if image.mode.startswith("I;16") or image.mode in ("I", "F"):
        image = _scale(image)
    if image.mode == "P" and "transparency" in image.info:
        image = image.convert("RGBA")  # the same colors in the end; without it Pillow warns
    return image if image.mode == mode else image.convert(mode)


def _scale(image: Image.Image) -> Image.Image:
    """Scale gray of 16 bits to 8. Pillow clips instead: nearly all pixels would turn white."""
    pixels, rows = np.asarray(image), max(1, _STRIP_PIXELS // image.width)
    strips = [_round(pixels[top : top + rows]) for top in range(0, image.height, rows)]
    return Image.fromarray(np.concatenate(strips))


def _round(deep: AnyArray) -> AnyArray:
    rounded: AnyArray = (deep.astype(np.float64) / 257).clip(0, 255).round().astype(np.uint8)
    return rounded


def arrange(image: Image.Image, spec: Preprocess, name: str) -> AnyArray:
    """Resize, crop or pad and normalize to one sample (no batch dimension) of the spec's layout and dtype.

    Args:
        image: Upright, in the spec's mode: RGB, or L.
        spec: Preprocessing.
        name: Name of the image in messages.

    Raises:
        InvalidInput: It would become too large on its way.
    """
    height, width = spec.resized(image.height, image.width)
    if height * width > _MOST_PIXELS_OF_ARRANGING:  # an image of one row can be resized to any width
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
