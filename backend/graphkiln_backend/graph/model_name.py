"""Names of models: what a folder, a URL, Triton and the shell that starts its Python stub can all take."""

from __future__ import annotations

import re
from urllib.parse import quote

MAX_LENGTH = 128
"""Triton names shared-memory regions and instances after the model, and a file name has 255 bytes at most."""

_LONGEST_SERVED = 200
"""Files that tell of an instance are named after its model and its process, and `NAME.images` after `NAME`."""

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
_SERVABLE = re.compile(r"[A-Za-z0-9_@%+=:,.-]+")
"""More than for new models: others write stores, too. Triton (24.10) hands the path of a model to a shell without
quotes: a space breaks it, and other characters would be executed."""
_LITERAL = "@%+=:,"
"""What Triton (24.10) expects in a path as it is: it compares the path with names of models and undoes no escapes."""


def fault_in_name(name: str) -> str:
    """What is wrong with the name of a new model, in words; empty where nothing is."""
    if len(name) > MAX_LENGTH:
        return f"'{name[:20]}...' has {len(name)} characters, at most {MAX_LENGTH} are allowed"
    if not _NAME.fullmatch(name):
        return (
            f"{name!r} is no model name: expected letters, digits, '_', '.' and '-', "
            "with a letter, a digit or '_' at the beginning"
        )
    return ""


def fault_in_served_name(name: str) -> str:
    """What keeps a folder of a model store from being served, in words; empty where nothing does."""
    if not _SERVABLE.fullmatch(name):
        return f"{name!r} is no name of a model that Triton's Python stub can take"
    if len(name) > _LONGEST_SERVED:
        return f"'{name[:20]}...' has {len(name)} characters, at most {_LONGEST_SERVED} can be served"
    return ""


def in_path(name: str) -> str:
    """A model's name as one part of the path of a request; what no served name holds is escaped (RFC 3986)."""
    return quote(name, safe=_LITERAL)
