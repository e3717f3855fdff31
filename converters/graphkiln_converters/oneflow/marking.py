"""How a function of `operators/` says which operations it translates."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from graphkiln_converters.oneflow.building import Op, Value

_Function = TypeVar("_Function", bound=Callable[[Op], Value | Sequence[Value]])

MARKED: dict[str, Callable[[Op], Value | Sequence[Value]]] = {}
"""Operation -> its translator."""


def translates(*kinds: str) -> Callable[[_Function], _Function]:
    """Marks a translator with the names of its operations."""

    def mark(function: _Function) -> _Function:
        MARKED.update(dict.fromkeys(kinds, function))
        return function

    return mark
