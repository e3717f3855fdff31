"""Translators, and how a function of `operators/` becomes one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from graphkiln_converters.oneflow.building import Op, Value

Translator = Callable[[Op], Value | Sequence[Value]]
"""Adds an operation's nodes to the graph and returns its results; those that the graph does not use may be missing."""

TRANSLATORS: dict[str, Translator] = {}
"""Operation -> its translator, as far as modules of `operators/` are imported."""


_T = TypeVar("_T", bound=Translator)


def translates(*kinds: str) -> Callable[[_T], _T]:
    """Registers a function as the translator of these operations."""

    def register(function: _T) -> _T:
        TRANSLATORS.update(dict.fromkeys(kinds, function))
        return function

    return register
