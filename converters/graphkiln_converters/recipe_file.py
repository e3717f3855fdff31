"""Read recipes: files with bases, manifests, and command line options."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from graphkiln_backend.graph.errors import ConversionError
from graphkiln_backend.graph.files import MIB, format_size, read_text
from graphkiln_backend.graph.text import did_you_mean
from graphkiln_converters.recipe import Recipe, first_line, respelled
from graphkiln_converters.sources.base import CODE_HINT

_BASE = "_base_"
_MOST_FILES = 100
# Notation of enumeration members in pydantic's messages.
_MEMBER = re.compile(r"<[\w.]+: ('[^']*')>")


def read_recipe(path: Path | None, options: Mapping[str, Any], overrides: Sequence[str]) -> Recipe:
    """Build a recipe from the file (and its bases), then options, then `key=value` overrides.

    Args:
        path: YAML or JSON file, or a manifest of an earlier conversion; None for none.
        options: Options of the command line, by field.
        overrides: `key=value` with a YAML value; `preprocess.mean=[0.5]` sets a nested key.

    Raises:
        ConversionError: A file cannot be read, or a key or value is invalid; the message suggests the nearest key.
    """
    document = _load(path, (), iter(range(_MOST_FILES))) if path is not None else {}
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


def _load(path: Path, parents: tuple[Path, ...], files: Iterator[int]) -> dict[str, Any]:
    """Read a recipe, merged over its bases, which are relative to its folder.

    Args:
        path: The file.
        parents: Recipes that are based on it.
        files: Counts the read files, to their maximum number.
    """
    try:
        path = path.resolve()
    except (OSError, RuntimeError, ValueError) as error:  # circular links, a null character
        raise ConversionError(f"cannot read recipe {path}: {error}") from error
    if path in parents:
        raise ConversionError(f"recipe {path} is based on itself: {' -> '.join(map(str, (*parents, path)))}")
    if next(files, None) is None:
        raise ConversionError(f"recipe {parents[0]} is based on more than {_MOST_FILES} files")
    document = _read(path)
    bases = document.pop(_BASE, [])
    bases = bases if isinstance(bases, list) else [bases]
    if not all(isinstance(base, str) and base for base in bases):
        raise ConversionError(f"cannot read recipe {path}: '{_BASE}' must be the name of a recipe, or a list of names")
    merged: dict[str, Any] = {}
    for base in bases:
        _merge(merged, _load(path.parent / base, (*parents, path), files))
    _merge(merged, document)
    return merged


def _read(path: Path) -> dict[str, Any]:
    """Read the keys of one file, renamed to those of this release."""
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
            f"recipe {path} contains allow_code", hint="only the command line can allow it: --allow-code"
        )
    return respelled(document)


def _recipe_of_manifest(manifest: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """Recipe of an earlier conversion, for the next version."""
    conversion = manifest.get("conversion")
    recipe = conversion.get("recipe") if isinstance(conversion, dict) else None
    if not isinstance(recipe, dict):
        raise ConversionError(f"the manifest {path} has no recipe", hint="it was not made by graphkiln convert")
    usual = {"int8_by": "onnxruntime"}  # before it was a choice
    return usual | {key: value for key, value in recipe.items() if key not in ("version", "digests")}


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
            raise ConversionError(f"'{key}' is a value, not a mapping of keys")
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


# YAML of recipes: plain data of bounded size, without duplicate keys.
#
# A few lines of YAML with aliases can expand to more data than fits into memory, so values are counted before the
# document is built.

_MOST_VALUES = 1_000_000
# Takes ten seconds to parse; larger JSON uses another parser.
_MOST_YAML = MIB


def parse_document(text: str, origin: str) -> Any:
    """Parse YAML or JSON text; `origin` is its name in errors.

    Raises:
        ConversionError: It is invalid, nested too deeply, has duplicate keys, or expands to too much data.
    """
    try:
        if text.lstrip().startswith("{"):
            return json.loads(text, object_pairs_hook=_unique)
    except _Duplicate as error:
        raise ConversionError(f"{origin}: {error}") from error
    except (ValueError, RecursionError):
        pass  # YAML in braces, whose parser has better error messages
    if len(text) > _MOST_YAML:
        raise ConversionError(f"{origin} is too large: it has more than {format_size(_MOST_YAML)} of YAML")
    try:
        return _parse_yaml(text)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        place = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise ConversionError(f"{origin} is not YAML: {error.problem or error.context}{place}") from error
    except RecursionError as error:
        raise ConversionError(f"{origin} is nested too deeply") from error
    except (yaml.YAMLError, ValueError, OverflowError) as error:
        raise ConversionError(f"{origin} is not YAML: {first_line(error)}") from error


def _parse_yaml(text: str) -> Any:
    loader = yaml.SafeLoader(text)
    try:
        node = loader.get_single_node()
        if node is None:
            return None
        _Census().count(node)
        return loader.construct_document(node)
    finally:
        loader.dispose()


class _Duplicate(ValueError):
    """A duplicate key."""


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [key for key, _ in pairs]
        raise _Duplicate(f"key '{next(key for key in found if names.count(key) > 1)}' is given twice")
    return found


class _Census:
    """Count the values of a document with aliases expanded, and refuse duplicate keys."""

    def __init__(self) -> None:
        self._counts: dict[int, int] = {}

    def count(self, node: yaml.Node) -> int:
        known = self._counts.get(id(node))
        if known is None:
            self._counts[id(node)] = 0
            known = self._counts[id(node)] = 1 + sum(map(self.count, _children(node)))
        elif not known:
            raise yaml.MarkedYAMLError(problem="an alias refers to a value around it", problem_mark=node.start_mark)
        if known > _MOST_VALUES:
            raise yaml.MarkedYAMLError(
                problem=f"it expands to more than {_MOST_VALUES} values", problem_mark=node.start_mark
            )
        return known


def _children(node: yaml.Node) -> list[yaml.Node]:
    if isinstance(node, yaml.SequenceNode):
        return list(node.value)
    if not isinstance(node, yaml.MappingNode):
        return []
    seen = set[str]()
    for key, _ in node.value:
        name = str(key.value) if isinstance(key, yaml.ScalarNode) else ""
        if name and name in seen:
            raise yaml.MarkedYAMLError(problem=f"key '{name}' is given twice", problem_mark=key.start_mark)
        seen.add(name)
    return [child for pair in node.value for child in pair]
