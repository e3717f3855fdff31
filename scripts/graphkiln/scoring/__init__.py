"""`graphkiln score` from Python, with the same options.

    from graphkiln.scoring import score

    record = score("photos", model="model_repository/digits", out="answers", top_k=3)
    print(record.figures.scored, record.figures.errors)

Every name below is imported at its first use (PEP 562); the extra `[score]` is needed from then on.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from graphkiln_backend.graph.errors import EngineUnavailable

if TYPE_CHECKING:
    from graphkiln.scoring.estimation import estimate
    from graphkiln.scoring.running import score, verify

__all__ = ["estimate", "score", "verify"]

_HOMES = {
    "estimate": "graphkiln.scoring.estimation",
    "score": "graphkiln.scoring.running",
    "verify": "graphkiln.scoring.running",
}
_NEEDED = ("ray", "pyarrow", "onnxruntime", "onnx")


def check_extra(what: str = "scoring", needed: Sequence[str] = _NEEDED) -> None:
    """Check that the extra `[score]` is installed; imports nothing of it.

    Args:
        what: Needs it.
        needed: What of it.

    Raises:
        EngineUnavailable: It is not; the hint installs it.
    """
    missing = [name for name in needed if find_spec(name) is None]
    if missing:
        raise EngineUnavailable(f"{what} needs {', '.join(missing)}", extra="score")


def __getattr__(name: str) -> Any:
    """Import a public name from its home.

    Raises:
        AttributeError: There is no such name.
        EngineUnavailable: The extra `[score]` is not installed.
    """
    if name not in _HOMES:
        raise AttributeError(f"module 'graphkiln.scoring' has no attribute '{name}'")
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """The public names."""
    return __all__
