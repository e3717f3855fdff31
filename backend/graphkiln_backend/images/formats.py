"""Which files are images: by their endings, and by what is decoded."""

from __future__ import annotations

from pathlib import Path

SUFFIXES = frozenset({".bmp", ".gif", ".jpeg", ".jpg", ".png", ".tif", ".tiff", ".webp"})
"""Endings of image files, in lower case."""

FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF")
"""What is decoded, by Pillow's names, whatever a file's ending says. It knows sixty more; one starts Ghostscript."""


def image_files(folder: Path, suffixes: frozenset[str] = SUFFIXES) -> list[Path]:
    """The images below a folder, sorted by path.

    Args:
        folder: Where to look, at any depth.
        suffixes: Endings that count, in lower case.
    """
    return sorted(path for path in folder.rglob("*") if path.suffix.lower() in suffixes and path.is_file())
