"""Which files are images: by their endings, and by what is decoded."""

from __future__ import annotations

from pathlib import Path

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

_NO_IMAGE = "._"
"""What macOS names a file after an image with, for what it knows of it besides: on FAT, in archives, on shares. Source:
AppleDouble, RFC 1740."""


def image_files(folder: Path, suffixes: frozenset[str] = SUFFIXES) -> list[Path]:
    """The images below a folder, sorted by path.

    Args:
        folder: Where to look, at any depth.
        suffixes: Endings that count, in lower case.
    """
    return sorted(path for path in folder.rglob("*") if _is_named_so(path, suffixes) and path.is_file())


def _is_named_so(path: Path, suffixes: frozenset[str]) -> bool:
    """Whether a file is an image by its name."""
    return path.suffix.lower() in suffixes and not path.name.startswith(_NO_IMAGE)
