"""The YAML of recipes: plain data of bounded size, each key once.

A few lines of YAML can stand for more than any memory holds: aliases repeat what they name, and so on. They are counted
before anything is built from them.
"""

from __future__ import annotations

import json
from typing import Any

import yaml

from graphkiln_backend.graph.errors import ConversionError
from graphkiln_backend.graph.files import MIB, format_size

_MOST_VALUES = 1_000_000
_MOST_YAML = MIB
"""Which takes ten seconds; JSON of any size is parsed by a parser of its own."""


def parse_document(text: str, origin: str) -> Any:
    """The data of YAML or JSON text.

    Args:
        text: The text.
        origin: Where it comes from, for errors.

    Raises:
        ConversionError: It is neither, is nested too deeply, repeats a key, or stands for too much.
    """
    try:
        if text.lstrip().startswith("{"):
            return json.loads(text, object_pairs_hook=_unique)
    except _Duplicate as error:
        raise ConversionError(f"{origin}: {error}") from error
    except (ValueError, RecursionError):
        pass  # YAML in braces, whose parser has a better word for what is wrong
    if len(text) > _MOST_YAML:
        raise ConversionError(f"{origin} is not read: it holds more than {format_size(_MOST_YAML)} of YAML")
    try:
        return _parse_yaml(text)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        place = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise ConversionError(f"{origin} is not YAML: {error.problem or error.context}{place}") from error
    except RecursionError as error:
        raise ConversionError(f"{origin} is nested too deeply") from error
    except (yaml.YAMLError, ValueError, OverflowError) as error:
        raise ConversionError(f"{origin} is not YAML: {(str(error).splitlines() or [''])[0]}") from error


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
    """A key that stands twice in an object."""


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [key for key, _ in pairs]
        raise _Duplicate(f"key '{next(key for key in found if names.count(key) > 1)}' is given twice")
    return found


class _Census:
    """Counts the values of a document with everything that its aliases repeat, and refuses keys that stand twice."""

    def __init__(self) -> None:
        self._counts: dict[int, int] = {}

    def count(self, node: yaml.Node) -> int:
        known = self._counts.get(id(node))
        if known is None:
            self._counts[id(node)] = 0
            known = self._counts[id(node)] = 1 + sum(map(self.count, _children(node)))
        elif not known:
            raise yaml.MarkedYAMLError(problem="an alias stands for something around it", problem_mark=node.start_mark)
        if known > _MOST_VALUES:
            raise yaml.MarkedYAMLError(
                problem=f"it stands for more than {_MOST_VALUES} values", problem_mark=node.start_mark
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
