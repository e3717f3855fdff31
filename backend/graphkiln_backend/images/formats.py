"""Which files are images, by their endings."""

from __future__ import annotations

from pathlib import Path

SUFFIXES = frozenset({".bmp", ".gif", ".jpeg", ".jpg", ".png", ".tif", ".tiff", ".webp"})
"""Endings of image files, in lower case."""


def image_files(folder: Path, suffixes: frozenset[str] = SUFFIXES) -> list[Path]:
    """The images below a folder, sorted by path.

    Args:
        folder: Where to look, at any depth.
        suffixes: Endings that count, in lower case.
    """
    return sorted(path for path in folder.rglob("*") if path.suffix.lower() in suffixes and path.is_file())
