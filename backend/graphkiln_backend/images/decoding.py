"""From an image in any usual form to one sample of an input tensor, by the published preprocess spec."""

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

# From a decoded image in its colors to a sample: resized, cropped or padded, normalized.

_MOST_PIXELS_OF_ARRANGING = 1 << 28

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


# A progressive JPEG may repeat all of its pixels in hundreds of scans: a small file would take any decoder minutes to
# hours, and Pillow sets no limit. Source: "Two Issues with the JPEG Standard", LJT-01-003 (libjpeg-turbo).

# Limit of libjpeg-turbo's own tools (`djpeg -maxscans`) and NVIDIA DALI. Programs write ten, careful ones some sixty.
_MOST_SCANS = 500
# Of all scans together: 24 of the largest image that is decoded at all.
_MOST_PIXELS = 1 << 32
# What ends the data of a scan: in them, 0xff is followed by 0 or a restart marker.
_MARKER = re.compile(rb"\xff+([^\x00\xd0-\xd7\xff])")
_SCAN, _END = 0xDA, 0xD9
# Markers that nothing follows. Source: ITU T.81, table B.1.
_WITHOUT_LENGTH = (0x01, 0xD8)


def check_scans(image: Image.Image, file: BinaryIO) -> None:
    """Refuse a JPEG that would take far longer than its size says.

    Args:
        image: Its header alone was read.
        file: What it is read from; read from wherever that is left at.

    Raises:
        ValueError: It is one.
    """
    if "progressive" not in image.info or image.format not in ("JPEG", "MPO"):
        return
    scans = count_scans(_read_whole(file))
    if scans > _MOST_SCANS or scans * image.width * image.height > _MOST_PIXELS:
        raise ValueError(
            f"it would take too long: {scans} scans of {image.width}x{image.height} pixels; save it without them"
        )


def _read_whole(file: BinaryIO) -> bytes:
    place = file.tell()
    file.seek(0)
    content = file.read()
    file.seek(place)
    return content


def count_scans(jpeg: bytes) -> int:
    """Scans of the first image of a file; as far as the file goes, where that is damaged."""
    scans = place = 0
    while found := _MARKER.search(jpeg, place):
        place, marker = found.end(), found[1][0]
        if marker == _END:
            break
        scans += marker == _SCAN
        if marker not in _WITHOUT_LENGTH:
            place += int.from_bytes(jpeg[place : place + 2], "big")
    return scans


# Errors for files that are no images: the format, as far as it is recognized, and a way to convert it.

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
    message = f"{name} is not an image in a known format"
    found = recognize(head)
    if found is None:
        return InvalidInput(message, hint=_KNOWN)
    return InvalidInput(f"{message}: it is {found.name}", hint="; ".join(filter(None, (found.way_out, _KNOWN))))


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


# A file path, an encoded image, a Pillow image, or uint8 pixels. Pixels are `[height, width]` or `[height, width, 3
# or 4]`.
ImageLike = str | Path | bytes | Image.Image | npt.NDArray[np.uint8]

# Number of pixels in memory -> a context held as long as they are.
Turn = Callable[[int], AbstractContextManager[object]]

_FILE_LIMIT = GIB
# Source: Linux, PATH_MAX. What is longer is shown by its beginning.
_LONGEST_PATH = 4096
# What is scaled to 8 bits, by Pillow's mode `I`.
_GRAYS = range(1 << 16)
# Where Pillow keeps what an orientation can stand in.
_METADATA = ("exif", "Raw profile type exif", "XML:com.adobe.xmp", "xmp")
# What turns an image of an orientation upright. Source: `PIL.ImageOps.exif_transpose`, which fails where other data
# of the EXIF cannot be written back.
_TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
# Orientations in which rows become columns. Source: Exif 2.32, tag 0x0112.
_SIDEWAYS = (5, 6, 7, 8)
# What a PNG's orientation can stand in, of which some may follow the pixels: Pillow decodes them to find it.
_PNG_METADATA = (b"eXIf", b"Raw profile type exif", b"XML:com.adobe.xmp")


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
        return Image.fromarray(check_pixels(image, describe(image)))
    if isinstance(image, bytes):
        return _decode(io.BytesIO(image), claim)
    upright = _upright(as_image(image))
    return upright.copy() if upright is image else upright  # the caller may go on to draw in it


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


@contextmanager
def _telling(name: str) -> Iterator[None]:
    """Translate errors of Pillow and the file system into `InvalidInput` with the image's name."""
    try:
        yield
    except InvalidInput:
        raise
    except UnknownFormat as error:
        raise refuse_format(name, error.head) from error
    except OSError as error:
        raise refuse_path(name, error) from error
    except MemoryError as error:
        raise InvalidInput(f"there is not enough memory to decode {name}") from error
    except Image.DecompressionBombError as error:
        hint = "make it smaller first: magick FILE -resize 8000x8000 OUT.jpg"
        raise InvalidInput(f"{name} is too large to decode safely: {error}", hint=hint) from error
    except Exception as error:  # damaged files make Pillow's decoders fail in any way
        raise InvalidInput(f"{name} cannot be decoded: {str(error) or type(error).__name__}") from error


def count_pixels(content: bytes) -> int:
    """Pixels of an encoded image by its header; nothing is decoded. 0 for what `open_image` refuses."""
    with suppress(Exception), Image.open(io.BytesIO(content), formats=FORMATS) as image:  # it may fail in any way
        return image.width * image.height
    return 0


@contextmanager
def _opened(file: BinaryIO) -> Iterator[Image.Image]:
    """An image of which the header alone was read.

    Raises:
        UnknownFormat: It is of another format, or its header is damaged.
    """
    try:
        image = Image.open(file, formats=FORMATS)
    except UnidentifiedImageError as error:
        file.seek(0)
        raise UnknownFormat(file.read(HEAD_BYTES)) from error
    with image:
        yield image


def _decode(file: BinaryIO, claim: Callable[[int, int], None]) -> Image.Image:
    """An image upright; its pixels stay when it is closed, so that no copy is needed of what may be 700 MB."""
    with _opened(file) as image:
        check_scans(image, file)
        claim(image.width, image.height)
        return _upright(image)


def _upright(image: Image.Image) -> Image.Image:
    """An image turned by its orientation; itself where it needs no turn."""
    if image.format == "EPS":  # a program, not pixels: never run it
        raise UnknownFormat(b"%!PS")
    image.load()
    _check_range(image)
    turn = _TURNS.get(_orientation(image))
    if turn is None:
        return image
    turned = image.transpose(turn)
    for key in _METADATA:  # or the next reader turns it again
        turned.info.pop(key, None)
    return turned


def _check_range(image: Image.Image) -> None:
    """Refuse pixels of which nothing says how bright they are: scaled by a guess, most turn black or white.

    Raises:
        ValueError: It has such.
    """
    if image.mode == "F" or (image.mode == "I" and not _has_16_bits(image)):
        raise ValueError("nothing says which of its 32-bit pixels are white; save it with 8 or 16 bits a channel")


def _has_16_bits(image: Image.Image) -> bool:
    """Return true where 32-bit pixels hold 16-bit values, as older Pillow reads PNGs; TIFFs have other ranges."""
    return image.format != "TIFF" and all(each in _GRAYS for each in image.getextrema())


def _orientation(image: Image.Image) -> int:
    """By the EXIF data; 1, which is upright, where these are damaged: everybody else shows such an image, too."""
    try:
        return int(image.getexif().get(ExifTags.Base.Orientation, 1))
    except Exception:  # noqa: BLE001 - damaged data make Pillow fail in any way
        return 1


@dataclass(frozen=True, slots=True)
class Prepared:
    """A sample, and the size of the image that it was made from.

    Attributes:
        sample: Of the spec's layout and dtype, without the batch.
        height: Of the upright image, in pixels.
        width: Likewise.
    """

    sample: AnyArray
    height: int
    width: int


def load_sample(image: ImageLike, spec: Preprocess, *, turn: Turn = nullcontext) -> AnyArray:
    """Turn an image into one sample (no batch dimension) of the spec's layout and dtype.

    Args:
        image: The image.
        spec: What to do with it.
        turn: As for `prepare`.

    Raises:
        InvalidInput: The image cannot be read.
    """
    return prepare(image, spec, turn=turn).sample


def prepare(image: ImageLike, spec: Preprocess, *, turn: Turn = nullcontext) -> Prepared:
    """Turn an image into one sample, and keep the size that answers about it are brought back to.

    Args:
        image: The image.
        spec: What to do with it.
        turn: What an encoded image is decoded and resized in.

    Raises:
        InvalidInput: The image cannot be read.
    """
    with ExitStack() as held:

        def claim(width: int, height: int) -> None:
            resized_height, resized_width = spec.resized(height, width)
            held.enter_context(turn(max(width * height, resized_width * resized_height)))

        with _telling(describe(image)):  # a rare kind of pixels may have no way to gray
            decoded = to_color(_open(image, claim), spec.color)
        return Prepared(arrange(decoded, spec, describe(image)), decoded.height, decoded.width)


# Images of any mode as models see them: colors or gray of 8 bits.

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
