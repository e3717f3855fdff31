"""Reads recipes: from files that may be based on each other, from manifests, and from the command line."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from graphkiln_backend.graph.errors import ConversionError
from graphkiln_backend.graph.files import read_text
from graphkiln_backend.graph.spelling import did_you_mean
from graphkiln_converters.recipe import Recipe, respelled
from graphkiln_converters.recipe_text import parse_document
from graphkiln_converters.sources.base import CODE_HINT

_BASE = "_base_"
_MOST_FILES = 100
_MEMBER = re.compile(r"<[\w.]+: ('[^']*')>")
"""How pydantic writes a member of an enumeration."""


def read_recipe(path: Path | None, options: Mapping[str, Any], overrides: Sequence[str]) -> Recipe:
    """Puts a recipe together: the file (and those it is based on), then options, then `key=value` overrides.

    Args:
        path: YAML or JSON file, or a manifest of an earlier conversion; None for none.
        options: What the command line says, by field; what it leaves out is not in it.
        overrides: `key=value` with a value in YAML; `preprocess.mean=[0.5]` reaches inside.

    Raises:
        ConversionError: A file cannot be read, or a key or value is not one; the message names the nearest key.
    """
    document = _Files().load(path, ()) if path is not None else {}
    source_in_file = document.get("source")
    document.update(options)
    for override in overrides:
        key, separator, text = override.partition("=")
        if not separator:
            raise ConversionError(f"'{override}' is not key=value")
        _set(document, key.split("."), parse_document(text, override))
        document = respelled(document)
    try:
        recipe = Recipe.model_validate(document)
    except ValidationError as error:
        raise _translated(error) from error
    if recipe.source == source_in_file and recipe.source.startswith("python:") and not recipe.allow_code:
        raise ConversionError(f"recipe {path} would run code: {recipe.source}", hint=CODE_HINT)
    return recipe


class _Files:
    """Reads a recipe and all that it is based on."""

    def __init__(self) -> None:
        self._left = _MOST_FILES

    def load(self, path: Path, seen: tuple[Path, ...]) -> dict[str, Any]:
        path = _resolved(path)
        if path in seen:
            raise ConversionError(f"recipe {path} is based on itself: {' -> '.join(map(str, (*seen, path)))}")
        self._left -= 1
        if self._left < 0:
            raise ConversionError(f"recipe {seen[0]} is based on more than {_MOST_FILES} files")
        document = _read(path)
        merged: dict[str, Any] = {}
        for base in _bases(document, path):
            _merge(merged, self.load(path.parent / base, (*seen, path)))
        _merge(merged, document)
        return merged


def _resolved(path: Path) -> Path:
    try:
        return path.resolve()
    except (OSError, RuntimeError, ValueError) as error:  # links in a circle, a null character
        raise ConversionError(f"cannot read recipe {path}: {error}") from error


def _read(path: Path) -> dict[str, Any]:
    """The keys of one file, by the names of this release."""
    try:
        content = read_text(path)
    except (OSError, UnicodeDecodeError) as error:
        raise ConversionError(f"cannot read recipe {path}: {error}") from error
    document = parse_document(content, str(path))
    if not isinstance(document, dict):
        raise ConversionError(f"recipe {path} must be a mapping of keys to values")
    if "format_version" in document:
        document = _recipe_of_manifest(document, path)
    if "allow_code" in document:
        raise ConversionError(
            f"recipe {path} holds allow_code", hint="only the command line can allow it: --allow-code"
        )
    return respelled(document)


def _bases(document: dict[str, Any], path: Path) -> list[str]:
    bases = document.pop(_BASE, [])
    bases = bases if isinstance(bases, list) else [bases]
    if not all(isinstance(base, str) and base for base in bases):
        raise ConversionError(f"cannot read recipe {path}: '{_BASE}' must be the name of a recipe, or a list of names")
    return bases


def _recipe_of_manifest(manifest: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """The recipe of an earlier conversion, to make the next version."""
    conversion = manifest.get("conversion")
    recipe = conversion.get("recipe") if isinstance(conversion, dict) else None
    if not isinstance(recipe, dict):
        raise ConversionError(f"the manifest {path} holds no recipe", hint="it was not made by graphkiln convert")
    return {key: value for key, value in recipe.items() if key != "version"}


def _merge(target: dict[str, Any], source: Mapping[str, Any]) -> None:
    for key, value in source.items():
        if isinstance(value, dict) and isinstance(target.get(key), dict):
            _merge(target[key], value)
        else:
            target[key] = value


def _set(document: dict[str, Any], keys: list[str], value: Any) -> None:
    for key in keys[:-1]:
        document = document.setdefault(key, {})
        if not isinstance(document, dict):
            raise ConversionError(f"'{key}' holds a value, not keys")
    document[keys[-1]] = value


def _translated(error: ValidationError) -> ConversionError:
    first = error.errors()[0]
    key = ".".join(map(str, first["loc"]))
    if first["type"] == "extra_forbidden":
        return ConversionError(f"recipe: unknown key '{key}'", hint=did_you_mean(key, Recipe.model_fields))
    if first["type"] == "missing":
        hint = str(Recipe.model_fields[key].description).rstrip(".")
        return ConversionError(f"recipe: '{key}' is missing", hint=hint)
    message = _MEMBER.sub(r"\1", first["msg"].removeprefix("Value error, "))
    return ConversionError(f"recipe: '{key}': {message}")
