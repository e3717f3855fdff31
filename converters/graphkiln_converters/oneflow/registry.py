"""Translators by the operation's name.

The built-in ones are the functions of `operators/` that are registered with `translates`. Third parties add theirs as
entry points of the group `graphkiln.oneflow_operators`: the name is the operation's (without the dialect), the value a
function that takes an `Op` and returns its outputs. Where both have a name, the third party's is used.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from functools import cache
from importlib import import_module
from importlib.metadata import entry_points
from pkgutil import iter_modules

from graphkiln_backend.graph.errors import ConversionError
from graphkiln_converters.oneflow import operators
from graphkiln_converters.oneflow.translator import TRANSLATORS, Translator

GROUP = "graphkiln.oneflow_operators"


def find_translators(kinds: Iterable[str]) -> dict[str, Translator]:
    """The translators of a graph's operations.

    Args:
        kinds: Their names, once for every operation.

    Raises:
        ConversionError: Some have none: all of them, with how often they occur.
    """
    counts = Counter(kinds)
    third_party = {entry.name: entry for entry in entry_points(group=GROUP)}
    built_in = built_in_translators()
    unknown = {kind: count for kind, count in counts.items() if kind not in third_party and kind not in built_in}
    if unknown:
        listed = ", ".join(f"{kind} ({count} times)" for kind, count in sorted(unknown.items()))
        raise ConversionError(
            f"{len(unknown)} of {len(counts)} kinds of operations cannot be translated: {listed}",
            hint=f"add translators as entry points of the group {GROUP}, or report the model",
        )
    return {kind: third_party[kind].load() if kind in third_party else built_in[kind] for kind in counts}


@cache
def built_in_translators() -> dict[str, Translator]:
    """Those of `operators/`, by operation."""
    for module in iter_modules(operators.__path__):
        import_module(f"{operators.__name__}.{module.name}")
    return dict(TRANSLATORS)
