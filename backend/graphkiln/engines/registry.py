"""Engines by name, found through the entry-point group `graphkiln.engines`; third parties take the same path."""

from __future__ import annotations

import difflib
from importlib.metadata import entry_points
from typing import cast

from graphkiln.engines.base import Engine
from graphkiln.graph.errors import EngineUnavailable

GROUP = "graphkiln.engines"

_EXTRAS = {"onnxruntime": "serve"}


def engine_names() -> list[str]:
    """Names of all registered engines, installed or not."""
    return sorted(entry.name for entry in entry_points(group=GROUP))


def load_engine(name: str) -> Engine:
    """Imports an engine.

    Raises:
        EngineUnavailable: No engine has that name, or its runtime is not installed (the error names the extra).
    """
    for entry in entry_points(group=GROUP, name=name):
        try:
            return cast("Engine", entry.load()())
        except ImportError as error:
            raise EngineUnavailable(
                f"engine '{name}' is known but its runtime is not installed: {error}", extra=_EXTRAS.get(name)
            ) from error
    near = difflib.get_close_matches(name, engine_names(), n=1)
    raise EngineUnavailable(
        f"unknown engine '{name}'",
        hint=f"did you mean '{near[0]}'?" if near else f"known engines: {', '.join(engine_names())}",
    )
