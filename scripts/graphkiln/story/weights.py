"""The weights that `scripts/train-story` trained for the story."""

from __future__ import annotations

from pathlib import Path

from graphkiln_backend.cache.settings import user_cache_folder

STORY_CACHE = "graphkiln-story"
"""Folder of all stories and of the trained weights, in the user's cache."""


def weights_path(architecture: str, image_size: int) -> Path:
    """Where `scripts/train-story` writes the weights of an architecture, and `graphkiln story` looks for them."""
    return user_cache_folder(STORY_CACHE) / f"{architecture}-digits-{image_size}.safetensors"


def find_trained_weights(source: str, image_size: int) -> Path | None:
    """The weights that `scripts/train-story` left for a source, or None where it was not run."""
    kind, _, architecture = source.partition(":")
    path = weights_path(architecture, image_size)
    return path if kind == "torchvision" and path.is_file() else None
