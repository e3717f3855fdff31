"""Waiting for what must happen: a hang is told from an answer, never a busy machine from a quiet one."""

from __future__ import annotations

import time
from collections.abc import Callable

_HANGS_S = 60.0


def wait_until(condition: Callable[[], bool]) -> None:
    """Returns as soon as a condition holds; fails where it never does."""
    deadline = time.monotonic() + _HANGS_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)
