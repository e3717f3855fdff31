"""Decode JSON data strictly into frozen dataclasses: errors name the path of unknown keys and wrong types.

It uses the standard library only, because the thin client decodes the published preprocess spec with it.
"""

from __future__ import annotations

import dataclasses
import enum
import json
import reprlib
import types
import typing
from collections.abc import Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, TypeVar

from graphkiln_backend.graph.errors import ManifestError
from graphkiln_backend.graph.text import did_you_mean

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

T = TypeVar("T", bound="DataclassInstance")

# Metadata of a field that is not written with its default value: new fields must not appear in documents whose digest
# older readers compute.
OMIT_DEFAULT = {"omit_default": True}

_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = _SHORT.maxlong = 200
# Maximum length of values in messages.
_SHORT.maxlist = _SHORT.maxtuple = _SHORT.maxdict = 20


def decode(cls: type[T], value: object, *, path: str = "") -> T:
    """Build a dataclass instance from plain JSON data.

    Args:
        cls: A dataclass whose fields are dataclasses, scalars, enums, Literals, tuples, dicts or unions of these.
        value: The JSON value, normally a dict.
        path: Path of the value in its file, for error messages.

    Raises:
        ManifestError: A key is unknown or missing, or a value is not of the field's type.
    """
    if not isinstance(value, Mapping):
        raise _wrong(path, "an object", value)
    hints = _hints(cls)
    fields = {field.name: field for field in dataclasses.fields(cls)}
    for key in value:
        if key not in fields:
            raise ManifestError(f"unknown key '{_join(path, key)}'", hint=did_you_mean(str(key), fields))
    arguments = {}
    for name, field in fields.items():
        if name in value:
            arguments[name] = decode_value(hints[name], value[name], _join(path, name))
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            raise ManifestError(f"missing key '{_join(path, name)}'")
    return cls(**arguments)


def encode(value: Any) -> Any:
    """Convert a dataclass (nested to any depth) to JSON data; inverse of `decode`."""
    if dataclasses.is_dataclass(value):
        written = [field for field in dataclasses.fields(value) if not _is_omitted(field, value)]
        return {field.name: encode(getattr(value, field.name)) for field in written}
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, tuple | list):
        return [encode(item) for item in value]
    if isinstance(value, Mapping):
        return {key: encode(item) for key, item in value.items()}
    return value


def decode_json(cls: type[T], text: str, *, what: str, path: str) -> T:
    """Build a dataclass instance from JSON text.

    Args:
        cls: As for `decode`.
        text: The JSON.
        what: Name of the document, for the error.
        path: As for `decode`.

    Raises:
        ManifestError: Not JSON, or not such an object; the message names the bad key.
    """
    return decode(cls, parse_json(text, what=what), path=path)


def parse_json(text: str, *, what: str) -> Any:
    """Parse JSON text.

    Args:
        text: The JSON.
        what: Name of the document, for the error.

    Raises:
        ManifestError: Not JSON.
    """
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ManifestError(f"{what} is not JSON: {error}") from error


def encode_json(value: Any) -> str:
    """Encode a dataclass as one line of JSON; inverse of `decode_json`."""
    return json.dumps(encode(value), separators=(",", ":"), ensure_ascii=False)


def decode_value(hint: Any, value: object, path: str) -> Any:
    """Build a value of any type that a field may have, such as a union of dataclasses.

    Args:
        hint: The type.
        value: The JSON value.
        path: As for `decode`.

    Raises:
        ManifestError: As for `decode`.
    """
    origin = typing.get_origin(hint)
    if origin in (typing.Union, types.UnionType):
        return _decode_union(typing.get_args(hint), value, path)
    if origin is typing.Literal:
        if value in typing.get_args(hint):
            return value
        raise _wrong(path, f"one of {', '.join(map(repr, typing.get_args(hint)))}", value)
    if origin is tuple:
        return _decode_tuple(typing.get_args(hint), value, path)
    if origin is dict:
        if not isinstance(value, Mapping):
            raise _wrong(path, "an object", value)
        item_hint = typing.get_args(hint)[1]
        return {str(key): decode_value(item_hint, item, _join(path, key)) for key, item in value.items()}
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        return decode(hint, value, path=path)
    return _decode_scalar(hint, value, path)


@cache
def _hints(cls: type[Any]) -> dict[str, Any]:
    """Types of a dataclass's fields; cached, because evaluating them takes longer than decoding a value."""
    return typing.get_type_hints(cls)


def _decode_union(options: tuple[Any, ...], value: object, path: str) -> Any:
    if value is None and type(None) in options:
        return None
    candidates = [option for option in options if option is not type(None)]
    if kinds := _kinds(candidates):
        return _decode_kind(kinds, value, path)
    for option in candidates[:-1]:
        try:
            return decode_value(option, value, path)
        except ManifestError:
            continue
    return decode_value(candidates[-1], value, path)


def _kinds(options: Sequence[Any]) -> dict[str, type[Any]]:
    """Dataclasses of a union by the value of their field `kind`; empty if one lacks the field."""
    if len(options) < 2 or not all(dataclasses.is_dataclass(option) for option in options):
        return {}
    kinds = {typing.get_args(_hints(option).get("kind")): option for option in options}
    return {} if () in kinds else {kind[0]: option for kind, option in kinds.items()}


def _decode_kind(kinds: Mapping[str, type[Any]], value: object, path: str) -> Any:
    if not isinstance(value, Mapping):
        raise _wrong(path, "an object", value)
    kind = value.get("kind")
    if not isinstance(kind, str) or kind not in kinds:
        raise _wrong(_join(path, "kind"), f"one of {', '.join(map(repr, kinds))}", kind)
    return decode(kinds[kind], value, path=path)


def _is_omitted(field: dataclasses.Field[Any], value: Any) -> bool:
    default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
    return bool(field.metadata.get("omit_default")) and getattr(value, field.name) == default


def _decode_tuple(items: tuple[Any, ...], value: object, path: str) -> tuple[Any, ...]:
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise _wrong(path, "a list", value)
    if len(items) == 2 and items[1] is Ellipsis:
        items = (items[0],) * len(value)
    if len(items) != len(value):
        raise _wrong(path, f"a list of {len(items)}", value)
    return tuple(
        decode_value(item, element, f"{path}[{index}]")
        for index, (item, element) in enumerate(zip(items, value, strict=True))
    )


def _decode_scalar(hint: Any, value: object, path: str) -> Any:
    if hint is Any:
        return value
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        try:
            return hint(value)
        except ValueError:
            raise _wrong(path, f"one of {', '.join(str(member.value) for member in hint)}", value) from None
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if isinstance(value, hint) and not (hint is not bool and isinstance(value, bool)):
        return value
    raise _wrong(path, f"a value of type {hint.__name__}", value)


def _join(path: str, key: object) -> str:
    return f"{path}.{key}" if path else str(key)


def _wrong(path: str, expected: str, value: object) -> ManifestError:
    return ManifestError(f"'{path or 'the document'}' must be {expected}, got {_SHORT.repr(value)}")
