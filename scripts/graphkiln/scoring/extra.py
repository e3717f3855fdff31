"""The check that the extra `[score]` is installed, before anything of it is imported."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec

from graphkiln_backend.graph.errors import EngineUnavailable

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
