"""`graphkiln score` from Python, with the same options.

    from graphkiln.scoring import score

    record = score("photos", model="model_repository/digits", out="answers", top_k=3)
    print(record.figures.scored, record.figures.errors)

    from graphkiln.scoring import udf

    classify = udf("model_repository/digits", top_k=3)  # a function of columns and tables: Daft, Ray, Polars, Spark

The functions are imported at their first use (PEP 562), which needs the extra `[score]`.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from graphkiln_backend.graph.modules import require_packages

if TYPE_CHECKING:
    from graphkiln.scoring.estimation import estimate
    from graphkiln.scoring.functions import ScoringFunction, udf
    from graphkiln.scoring.running import score, verify

__all__ = ["ScoringFunction", "estimate", "score", "udf", "verify"]

_MODULES = {
    "ScoringFunction": "graphkiln.scoring.functions",
    "estimate": "graphkiln.scoring.estimation",
    "score": "graphkiln.scoring.running",
    "udf": "graphkiln.scoring.functions",
    "verify": "graphkiln.scoring.running",
}
_PACKAGES = ("ray", "pyarrow", "onnxruntime", "onnx")
_WITHOUT_RAY = ("ScoringFunction", "udf")


def check_extra() -> None:
    """Check that the extra `[score]` is installed.

    Raises:
        EngineUnavailable: A package is missing.
    """
    require_packages("scoring", _PACKAGES, extra="score")


def __getattr__(name: str) -> Any:
    """Import a public function.

    Raises:
        AttributeError: There is no such name.
        EngineUnavailable: The extra `[score]` is not installed.
    """
    if name not in _MODULES:
        raise AttributeError(f"module 'graphkiln.scoring' has no attribute '{name}'")
    if name in _WITHOUT_RAY:
        require_packages("scoring", _PACKAGES[1:], extra="score")
    else:
        check_extra()
    value = getattr(import_module(_MODULES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """List the public functions."""
    return __all__
