"""Which files are images: by their endings, and by what is decoded."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
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
