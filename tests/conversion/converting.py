"""Names shared by the tests of conversion."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

MODULES = Path(__file__).parent / "modules.py"
Convert = Callable[..., Path]
