"""docs/reference/manifest.md and manifest.schema.json: the format of `manifest.json`, from the types that read it."""

from __future__ import annotations

import dataclasses
import json
import types
from collections.abc import Iterator
from enum import Enum
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from documenting.text import attributes_of, code, summary_of, table
from graphkiln_backend.graph.manifest import FORMAT_VERSION, Manifest

_INTRODUCTION = f"""# The manifest

Written by `scripts/docs` from the types that read and write it (`graphkiln_backend.graph.manifest`).
`manifest.json` is beside the graph of each version, in format {FORMAT_VERSION}; unknown keys are refused, and the
error names the path of the bad one. The same as JSON Schema: [manifest.schema.json](manifest.schema.json).

"""
_PLAIN = {str: "string", int: "integer", float: "number", bool: "boolean"}


def render() -> str:
    """The page."""
    return _INTRODUCTION + "\n".join(map(_section, parts()))


def render_schema() -> str:
    """The JSON Schema, as a file."""
    return json.dumps(schema(), indent=1) + "\n"


def schema() -> dict[str, Any]:
    """JSON Schema (2020-12) of a manifest."""
    definitions = {part.__name__: _object(part) for part in parts()}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "graphkiln manifest",
        "$ref": f"#/$defs/{Manifest.__name__}",
        "$defs": definitions,
    }


def parts(root: type[Any] = Manifest) -> list[type[Any]]:
    """The dataclasses that a document is made of, outer ones first."""
    found: list[type[Any]] = []
    waiting = [root]
    while waiting:
        part = waiting.pop(0)
        if part not in found:
            found.append(part)
            waiting += [each for hint in _hints(part).values() for each in _leaves(hint) if _is_part(each)]
    return found


def _hints(part: type[Any]) -> dict[str, Any]:
    known = get_type_hints(part)
    return {field.name: known[field.name] for field in dataclasses.fields(part)}


def _leaves(hint: Any) -> Iterator[Any]:
    inner = get_args(hint)
    if get_origin(hint) is Literal or not inner:
        yield hint
    for each in inner if get_origin(hint) is not Literal else ():
        yield from _leaves(each)


def _is_part(kind: Any) -> bool:
    return dataclasses.is_dataclass(kind)


def _section(part: type[Any]) -> str:
    said, hints = attributes_of(part), _hints(part)
    rows = [
        (code(field.name), _in_words(hints[field.name]), _left_out(field), said.get(field.name, ""))
        for field in dataclasses.fields(part)
    ]
    return f"## {part.__name__}\n\n{summary_of(part)}\n\n{table(['key', 'value', '', 'says'], rows)}"


def _left_out(field: dataclasses.Field[Any]) -> str:
    return "" if _is_required(field) else "may be left out"


def _is_required(field: dataclasses.Field[Any]) -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


def _in_words(hint: Any) -> str:
    inner = get_args(hint)
    if _is_union(hint):
        return " or ".join(_in_words(each) for each in inner)
    if get_origin(hint) is Literal:
        return ", ".join(code(str(each)) for each in inner)
    if get_origin(hint) is tuple:
        count = "list of" if inner[-1] is Ellipsis else f"{len(inner)}:"
        return f"{count} {_in_words(inner[0])}"
    if get_origin(hint) is dict:
        return f"object: name to {_in_words(inner[1])}"
    return _plain_words(hint)


def _plain_words(hint: Any) -> str:
    if hint is type(None):
        return "null"
    if _is_part(hint):
        return f"[{hint.__name__}](#{hint.__name__.lower()})"
    if isinstance(hint, type) and issubclass(hint, Enum):
        return ", ".join(code(str(each.value)) for each in hint)
    return _PLAIN.get(hint, "any")


def _object(part: type[Any]) -> dict[str, Any]:
    properties = {name: _schema_of(hint) for name, hint in _hints(part).items()}
    required = [field.name for field in dataclasses.fields(part) if _is_required(field)]
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def _schema_of(hint: Any) -> dict[str, Any]:
    inner = get_args(hint)
    if _is_union(hint):
        return {"anyOf": [_schema_of(each) for each in inner]}
    if get_origin(hint) is Literal:
        return {"enum": list(inner)}
    if get_origin(hint) is tuple:
        items = {"type": "array", "items": _schema_of(inner[0])}
        return items if inner[-1] is Ellipsis else {**items, "minItems": len(inner), "maxItems": len(inner)}
    if get_origin(hint) is dict:
        return {"type": "object", "additionalProperties": _schema_of(inner[1])}
    return _plain_schema(hint)


def _plain_schema(hint: Any) -> dict[str, Any]:
    if hint is type(None):
        return {"type": "null"}
    if _is_part(hint):
        return {"$ref": f"#/$defs/{hint.__name__}"}
    if isinstance(hint, type) and issubclass(hint, Enum):
        return {"enum": [each.value for each in hint]}
    return {"type": _PLAIN[hint]} if hint in _PLAIN else {}


def _is_union(hint: Any) -> bool:
    return get_origin(hint) in (Union, types.UnionType)
