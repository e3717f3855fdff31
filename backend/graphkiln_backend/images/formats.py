"""Which files are images: by their endings, and by what is decoded."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from graphkiln_backend.graph.errors import InvalidInput

# What a file is that is not decoded here, by how it begins, and how an image comes of it that is.
#
# People name a file `cat.jpg` that a phone saved as HEIC, that a web page hides behind, or whose content stayed on a
# server of Git LFS. That it is no image helps none of them.

HEAD_BYTES = 512
"""How much of a file `recognize` looks at."""


@dataclass(frozen=True, slots=True)
class OtherFormat:
    """What a file is.

    Attributes:
        name: As it stands behind "it is".
        way_out: What to do; empty where there is nothing.
    """

    name: str
    way_out: str = ""


_HEIC = OtherFormat("HEIC", "convert it: heif-convert FILE OUT.jpg")
_AVIF = OtherFormat("AVIF", "convert it: avifdec FILE OUT.png")
_JXL = OtherFormat("JPEG XL", "convert it: djxl FILE OUT.png")
_JPEG_2000 = OtherFormat("JPEG 2000", "convert it: opj_decompress -i FILE -o OUT.png")
_VIDEO = OtherFormat("a video", "take an image out of it: ffmpeg -i FILE -frames:v 1 OUT.png")
_RAW = OtherFormat("a camera's raw data", "develop it: darktable-cli FILE OUT.jpg")
_SVG = OtherFormat("SVG, a drawing without pixels", "draw it: rsvg-convert FILE -o OUT.png")
_PAGE = OtherFormat("a web page", "look into it: whoever was asked for the image sent this in its place")
_JSON = OtherFormat("JSON", "look into it: whoever was asked for the image sent this in its place")
_LFS = OtherFormat("a pointer of Git LFS", "fetch the content: git lfs pull")
_BASE64 = OtherFormat("base64 text", "decode it first: base64 -d FILE, in Python base64.b64decode(TEXT)")
_DATA_URL = OtherFormat("a data: URL", 'decode what follows its comma: base64.b64decode(URL.partition(",")[2])')
_MAGICK = "convert it: magick FILE OUT.png"

_BRANDS = {
    **dict.fromkeys((b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx", b"mif1", b"msf1"), _HEIC),
    **dict.fromkeys((b"avif", b"avis"), _AVIF),
    b"crx ": _RAW,
}
"""What a file of boxes holds, by its brand; all others are videos. Sources: ISO/IEC 23008-12, annex B; AVIF 1.1, 6."""

_SIGNATURES = (
    (0, b"\x89PNG", OtherFormat("damaged: it begins as a PNG")),
    (0, b"\xff\xd8\xff", OtherFormat("damaged: it begins as a JPEG")),
    (0, b"GIF8", OtherFormat("damaged: it begins as a GIF")),
    (8, b"WEBP", OtherFormat("damaged: it begins as a WebP")),
    (0, b"\0\0\0\x0cJXL ", _JXL),
    (0, b"\xff\x0a", _JXL),
    (0, b"\0\0\0\x0cjP  ", _JPEG_2000),
    (0, b"\xff\x4f\xff\x51", _JPEG_2000),
    (0, b"\x1aE\xdf\xa3", _VIDEO),
    (8, b"AVI ", _VIDEO),
    (0, b"FUJIFILMCCD-RAW", _RAW),
    (0, b"IIRO", _RAW),
    (0, b"IIRS", _RAW),
    (0, b"IIU\0", _RAW),
    (0, b"8BPS", OtherFormat("a Photoshop file", "convert it: magick 'FILE[0]' OUT.png")),
    (0, b"\0\0\1\0", OtherFormat("an icon", _MAGICK)),
    (0, b"DDS ", OtherFormat("a texture", _MAGICK)),
    *((0, b"P%d" % kind + end, OtherFormat("Netpbm", _MAGICK)) for kind in range(1, 8) for end in (b"\n", b" ", b"\r")),
    (0, b"%PDF", OtherFormat("PDF", "draw its pages: pdftoppm -png FILE OUT")),
    (0, b"%!PS", OtherFormat("PostScript, a program that draws", "have who made it save it as PNG")),
    (0, b"\x93NUMPY", OtherFormat("an array of numpy", "pass the array itself: numpy.load(FILE)")),
    (0, b"PK\3\4", OtherFormat("a ZIP archive", "unpack it")),
    (0, b"\x1f\x8b", OtherFormat("compressed by gzip", "unpack it: gunzip FILE")),
    (0, b"\0\5\x16\7", OtherFormat("what macOS keeps of an image beside it")),
)
"""Where what stands in a file, by its kind. Source: the formats' own documents, as file(1) lists them."""

_TEXTS = (
    (b"version https://git-lfs", _LFS),
    (b"data:", _DATA_URL),
    (b"<!doctype html", _PAGE),
    (b"<html", _PAGE),
    (b'{"', _JSON),
)
"""How texts begin, in lower case."""
_BASE64_BEGINS = (b"/9j/", b"iVBORw0KGgo", b"R0lGOD", b"UklGR", b"SUkqA", b"TU0AK")
"""How JPEG, PNG, GIF, WebP and TIFF begin in base64."""


def recognize(head: bytes) -> OtherFormat | None:
    """What a file is; None where nobody knows.

    Args:
        head: Its first `HEAD_BYTES`, or all of it.
    """
    if not head:
        return OtherFormat("empty")
    if head[4:8] == b"ftyp":
        return _AVIF if b"avif" in head[8:48] else _BRANDS.get(head[8:12], _VIDEO)  # HEIF's brand may come first
    named = (found for start, signature, found in _SIGNATURES if head[start:].startswith(signature))
    return next(named, None) or recognize_text(head)


def recognize_text(head: bytes) -> OtherFormat | None:
    """What a text is; None for anything else.

    Args:
        head: How it begins.
    """
    text = head.removeprefix(b"\xef\xbb\xbf").lstrip()
    if text.startswith(_BASE64_BEGINS):
        return _BASE64
    text = text.lower()
    if text.startswith((b"<svg", b"<?xml", b"<!--")) and b"<svg" in text:
        return _SVG
    return next((found for begin, found in _TEXTS if text.startswith(begin)), None)


SUFFIXES = frozenset({".bmp", ".gif", ".jfif", ".jpe", ".jpeg", ".jpg", ".png", ".tif", ".tiff", ".webp"})
"""Endings of image files, in lower case."""

FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF")
"""What is decoded, by Pillow's names, whatever a file's ending says. It knows sixty more; one starts Ghostscript."""

OTHER_SUFFIXES = frozenset(
    {
        ".arw", ".avif", ".cr2", ".cr3", ".dng", ".eps", ".heic", ".heif", ".hif", ".ico", ".j2k", ".jp2", ".jxl",
        ".nef", ".orf", ".pbm", ".pgm", ".ppm", ".psd", ".raf", ".rw2", ".svg", ".tga",
    }
)  # fmt: skip
"""Endings of images that are not decoded here, in lower case: whoever looks for images in a folder is told of them."""

_ENDINGS = f"known endings: {' '.join(sorted(SUFFIXES))}"


def image_files(folder: Path, suffixes: frozenset[str] = SUFFIXES) -> list[Path]:
    """The images below a folder, sorted by path; as for `score`, linked folders are followed, hidden names left out.

    Those are thumbnails, and what macOS keeps of an image beside it (`._NAME`, AppleDouble, RFC 1740).

    Links that lead nowhere are among them: whoever opens one is told of it.

    Args:
        folder: Where to look, at any depth.
        suffixes: Endings that count, in lower case.

    Raises:
        InvalidInput: A folder there may not be looked into.
    """
    return sorted(file for file in _files(folder, ()) if file.suffix.lower() in suffixes)


def list_images(folder: Path) -> tuple[list[Path], str]:
    """The images below a folder, sorted by path, and what to say of others there that are not decoded; empty for none.

    Raises:
        InvalidInput: There are none, or as `image_files`.
    """
    files = image_files(folder, SUFFIXES | OTHER_SUFFIXES)
    others = [file for file in files if file.suffix.lower() in OTHER_SUFFIXES]
    known = [file for file in files if file.suffix.lower() in SUFFIXES]
    if not files:
        raise InvalidInput(f"folder {folder} holds no image", hint=_ENDINGS)
    if not known:
        raise InvalidInput(f"folder {folder} holds {_count(others)} of other formats", hint=f"convert them; {_ENDINGS}")
    return known, f"{folder}: left out {_count(others)} of other formats ({_ENDINGS})" if others else ""


def _count(files: Sequence[Path]) -> str:
    return f"{len(files)} {'file' if len(files) == 1 else 'files'}, such as {files[0]},"


def _files(folder: Path, above: tuple[tuple[int, int], ...]) -> Iterator[Path]:
    """What is no folder below one, but hidden files; a link back to a folder that holds it would never end."""
    try:
        status = folder.stat()
        with os.scandir(folder) as entries:
            places = [folder / entry.name for entry in entries if not entry.name.startswith(".")]
        folders = {place for place in places if place.is_dir()}
    except (FileNotFoundError, NotADirectoryError):  # there are none
        return
    except OSError as error:
        raise InvalidInput(f"the images in {folder} cannot be listed: {error.strerror}") from error
    here = (status.st_dev, status.st_ino)
    for place in places if here not in above else ():
        if place in folders:
            yield from _files(place, (*above, here))
        else:
            yield place
