"""Reads recipes: from files that may be based on each other, from manifests, and from the command line."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from graphkiln_backend.graph.errors import ConversionError
from graphkiln_backend.graph.spelling import did_you_mean
from graphkiln_converters.recipe import Recipe, respelled

_BASE = "_base_"
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
    document = _load(path, ()) if path is not None else {}
    document.update(options)
    for override in overrides:
        key, separator, text = override.partition("=")
        if not separator:
            raise ConversionError(f"'{override}' is not key=value")
        _set(document, key.split("."), _parse(text, override))
        document = respelled(document)
    try:
        return Recipe.model_validate(document)
    except ValidationError as error:
        raise _translated(error) from error


def _load(path: Path, seen: tuple[Path, ...]) -> dict[str, Any]:
    path = path.resolve()
    if path in seen:
        raise ConversionError(f"recipe {path} is based on itself: {' -> '.join(map(str, (*seen, path)))}")
    try:
        content = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ConversionError(f"cannot read recipe {path}: {error}") from error
    document = _parse(content, str(path))
    if not isinstance(document, dict):
        raise ConversionError(f"recipe {path} must be a mapping of keys to values")
    if "format_version" in document:
        document = _recipe_of_manifest(document, path)
    document = respelled(document)
    bases = document.pop(_BASE, [])
    merged: dict[str, Any] = {}
    for base in bases if isinstance(bases, list) else [bases]:
        _merge(merged, _load(path.parent / str(base), (*seen, path)))
    _merge(merged, document)
    return merged


def _recipe_of_manifest(manifest: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """The recipe of an earlier conversion, to make the next version."""
    conversion = manifest.get("conversion")
    recipe = conversion.get("recipe") if isinstance(conversion, dict) else None
    if not isinstance(recipe, dict):
        raise ConversionError(f"the manifest {path} holds no recipe", hint="it was not made by graphkiln convert")
    return {key: value for key, value in recipe.items() if key != "version"}


def _parse(text: str, origin: str) -> Any:
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConversionError(f"{origin} is not YAML: {error}") from error


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
