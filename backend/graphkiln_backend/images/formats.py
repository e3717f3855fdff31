"""Which files are images: by their endings, and by what is decoded."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from graphkiln_backend.graph.errors import InvalidInput

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
_NO_IMAGE = "._"
"""What macOS names a file after an image with, for what it knows of it besides: on FAT, in archives, on shares. Source:
AppleDouble, RFC 1740."""


def image_files(folder: Path, suffixes: frozenset[str] = SUFFIXES) -> list[Path]:
    """The images below a folder, sorted by path; links that lead nowhere are among them, for they are meant to be some.

    Args:
        folder: Where to look, at any depth.
        suffixes: Endings that count, in lower case.

    Raises:
        InvalidInput: A folder there may not be looked into.
    """
    places = os.walk(folder, onerror=_refuse)
    files = (Path(place, name) for place, _, names in places for name in names)
    return sorted(file for file in files if _is_named_so(file, suffixes))


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


def _is_named_so(path: Path, suffixes: frozenset[str]) -> bool:
    """Whether a file is an image by its name."""
    return path.suffix.lower() in suffixes and not path.name.startswith(_NO_IMAGE)


def _refuse(error: OSError) -> None:
    """Refuses a folder whose images would be passed over; of one that is not there, there are none."""
    if not isinstance(error, FileNotFoundError | NotADirectoryError):
        raise InvalidInput(f"the images in {error.filename} cannot be listed: {error.strerror}") from error
