"""Image formats: suffixes, supported formats, and names of unsupported ones."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from graphkiln_backend.graph.errors import InvalidInput

# Bytes at the beginning of a file that `recognize` needs.
HEAD_BYTES = 512


@dataclass(frozen=True, slots=True)
class OtherFormat:
    """An unsupported format.

    Attributes:
        name: Name for messages: "it is NAME".
        hint: Advice; may be empty.
    """

    name: str
    hint: str = ""


_MAGICK = "convert it: magick FILE OUT.png"
_VIDEO = OtherFormat("a video", "take an image out of it: ffmpeg -i FILE -frames:v 1 OUT.png")
_RAW = OtherFormat("a camera's raw data", "develop it: darktable-cli FILE OUT.jpg")
_AVIF = OtherFormat("AVIF", "convert it: avifdec FILE OUT.png")
_HEIC = OtherFormat("HEIC", "convert it: heif-convert FILE OUT.jpg")
_HEIC_BRANDS = (b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx", b"mif1", b"msf1")
_SVG = OtherFormat("SVG, a drawing without pixels", "draw it: rsvg-convert FILE -o OUT.png")
_BASE64 = OtherFormat("base64 text", "decode it first: base64 -d FILE, in Python base64.b64decode(TEXT)")
# Beginnings of JPEG, PNG, GIF, WebP and TIFF in base64.
_BASE64_BEGINS = (b"/9j/", b"iVBORw0KGgo", b"R0lGOD", b"UklGR", b"SUkqA", b"TU0AK")
_NO_IMAGE = "open it in an editor: a server sent it in place of an image"

# Offset, signatures, name, hint. Source: the formats' specifications, as file(1) lists them.
_SIGNATURES = (
    (0, (b"\x89PNG",), "damaged: it begins as a PNG", ""),
    (0, (b"\xff\xd8\xff",), "damaged: it begins as a JPEG", ""),
    (0, (b"GIF8",), "damaged: it begins as a GIF", ""),
    (8, (b"WEBP",), "damaged: it begins as a WebP", ""),
    (0, (b"\0\0\0\x0cJXL ", b"\xff\x0a"), "JPEG XL", "convert it: djxl FILE OUT.png"),
    (0, (b"\0\0\0\x0cjP  ", b"\xff\x4f\xff\x51"), "JPEG 2000", "convert it: opj_decompress -i FILE -o OUT.png"),
    (0, (b"\x1aE\xdf\xa3",), _VIDEO.name, _VIDEO.hint),
    (8, (b"AVI ",), _VIDEO.name, _VIDEO.hint),
    (0, (b"FUJIFILMCCD-RAW", b"IIRO", b"IIRS", b"IIU\0"), _RAW.name, _RAW.hint),
    (0, (b"8BPS",), "a Photoshop file", "convert it: magick 'FILE[0]' OUT.png"),
    (0, (b"\0\0\1\0",), "an icon", _MAGICK),
    (0, (b"DDS ",), "a texture", _MAGICK),
    (0, tuple(b"P%d" % kind + end for kind in range(1, 8) for end in (b"\n", b" ", b"\r")), "Netpbm", _MAGICK),
    (0, (b"%PDF",), "PDF", "draw its pages: pdftoppm -png FILE OUT"),
    (0, (b"%!PS",), "PostScript, a program that draws", "save it as PNG in the program that made it"),
    (0, (b"\x93NUMPY",), "an array of numpy", "pass the array itself: numpy.load(FILE)"),
    (0, (b"PK\3\4",), "a ZIP archive", "unpack it"),
    (0, (b"\x1f\x8b",), "compressed by gzip", "unpack it: gunzip FILE"),
    (0, (b"\0\5\x16\7",), "what macOS keeps of an image beside it", ""),
)

# Beginnings of texts, in lower case.
_TEXTS = (
    (b"version https://git-lfs", "a pointer of Git LFS", "fetch the content: git lfs pull"),
    (b"data:", "a data: URL", 'decode what follows its comma: base64.b64decode(URL.partition(",")[2])'),
    (b"<!doctype html", "a web page", _NO_IMAGE),
    (b"<html", "a web page", _NO_IMAGE),
    (b'{"', "JSON", _NO_IMAGE),
)


def recognize(head: bytes) -> OtherFormat | None:
    """Recognize an unsupported format, or return None.

    Args:
        head: The first `HEAD_BYTES` of the file, or all of it.
    """
    if not head:
        return OtherFormat("empty")
    if head[4:8] == b"ftyp":  # ISO/IEC 23008-12, annex B; AVIF 1.1, 6. HEIF's brand may come before AVIF's.
        if b"avif" in head[8:48] or head[8:12] == b"avis":
            return _AVIF
        return _HEIC if head[8:12] in _HEIC_BRANDS else _RAW if head[8:12] == b"crx " else _VIDEO
    for start, signatures, name, hint in _SIGNATURES:
        if head[start:].startswith(signatures):
            return OtherFormat(name, hint)
    return recognize_text(head)


def recognize_text(head: bytes) -> OtherFormat | None:
    """Recognize text given instead of an image, or return None."""
    text = head.removeprefix(b"\xef\xbb\xbf").lstrip()
    if text.startswith(_BASE64_BEGINS):
        return _BASE64
    text = text.lower()
    if text.startswith((b"<svg", b"<?xml", b"<!--")) and b"<svg" in text:
        return _SVG
    return next((OtherFormat(name, hint) for begin, name, hint in _TEXTS if text.startswith(begin)), None)


# Suffixes of image files, in lower case.
SUFFIXES = frozenset({".bmp", ".gif", ".jfif", ".jpe", ".jpeg", ".jpg", ".png", ".tif", ".tiff", ".webp"})

# Supported formats, by Pillow's names, independent of suffixes. Pillow has sixty more; one of them runs Ghostscript.
FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF")

# Suffixes of unsupported images, in lower case: reported by `list_images`.
OTHER_SUFFIXES = frozenset(
    {
        ".arw", ".avif", ".cr2", ".cr3", ".dng", ".eps", ".heic", ".heif", ".hif", ".ico", ".j2k", ".jp2", ".jxl",
        ".nef", ".orf", ".pbm", ".pgm", ".ppm", ".psd", ".raf", ".rw2", ".svg", ".tga",
    }
)  # fmt: skip

_ENDINGS = f"known endings: {' '.join(sorted(SUFFIXES))}"


def image_files(folder: Path, suffixes: frozenset[str] = SUFFIXES) -> list[Path]:
    """List the images below a folder, sorted by path; like in `score`, links are followed and hidden names skipped.

    Hidden names are thumbnails and AppleDouble files (`._NAME`, RFC 1740). Dangling links are included: opening them
    reports the error.

    Args:
        folder: The folder, searched at any depth.
        suffixes: Accepted suffixes, in lower case.

    Raises:
        InvalidInput: A folder cannot be read.
    """
    return sorted(file for file in _files(folder, ()) if file.suffix.lower() in suffixes)


def list_images(folder: Path) -> tuple[list[Path], str]:
    """List the images below a folder, sorted by path, and describe unsupported ones.

    Raises:
        InvalidInput: There are no images, or as for `image_files`.
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
    """Walk files below a folder without hidden ones; links back to a parent folder are not followed."""
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
