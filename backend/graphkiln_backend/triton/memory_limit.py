"""An instance's part in the limit on tritonserver's memory (see `graphkiln_backend.server.limits`)."""

from __future__ import annotations

import resource
from contextlib import suppress


def lift_memory_limit() -> None:
    """Lifts the limit that this process was started with, as far as the user's own goes."""
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    with suppress(OSError, ValueError):  # a system that knows no such limit
        resource.setrlimit(resource.RLIMIT_DATA, (hard, hard))
