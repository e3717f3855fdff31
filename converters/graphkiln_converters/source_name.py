"""The model name that a source suggests, for a conversion that is given none."""

from __future__ import annotations

import re
from pathlib import PurePath

from graphkiln_backend.graph.model_name import MAX_LENGTH

_KIND = re.compile(r"[a-z]{2,}(?=:)")
_ILLEGAL = re.compile(r"[^A-Za-z0-9_.-]+")
_GENERIC = {"model", "saved", "graph", "network", "weights"}
"""Names that say nothing: the folder around them says more."""


def name_of(source: str) -> str:
    """A legal model name for a source: its architecture, factory, file or folder; empty where it has none.

    A `model.onnx` of a model repository (`NAME/1/model.onnx`) is called NAME.
    """
    source = source.replace("://", "/")  # an address names a file as a path does
    kind = _KIND.match(source)
    location = source.partition(":")[2] if kind else source
    if kind and kind[0] == "python":
        return _legal(location.rpartition(":")[2])
    if kind and "/" not in location:
        return _legal(location)
    path = PurePath(location)
    parts = [*path.parts[:-1], path.name if kind else path.stem]
    names = [name for name in map(_legal, parts) if name]
    telling = [name for name in names if name.lower() not in _GENERIC and not name.isdecimal()]
    return next(reversed(telling or names), "")


def _legal(text: str) -> str:
    """A text whose characters are those of model names, in as few changes as possible."""
    return _ILLEGAL.sub("-", text).strip("-.")[:MAX_LENGTH]
