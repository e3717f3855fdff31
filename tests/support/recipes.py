"""Recipes for tests of sources."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from graphkiln_converters.recipe import Recipe


def recipe(source: str = "test", *, shapes: Mapping[str, tuple[int, ...]] | None = None, **fields: Any) -> Recipe:
    """Make a recipe with the sizes of samples by input; the name of the only input is empty."""
    sizes = {name: "x".join(map(str, shape)) for name, shape in (shapes or {}).items()}
    shape = tuple(f"{name}={text}" if name else text for name, text in sizes.items())
    return Recipe(source=source, name="test", shape=shape, **fields)
