"""Durations as people write them."""

from __future__ import annotations

import math
import re

from graphkiln_backend.graph.errors import InvalidInput

_DURATION = re.compile(r"(\d+(?:\.\d+)?(?:e[+-]?\d+)?)\s*([a-z]+)", re.IGNORECASE)
_SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}


def parse_duration(text: str, option: str, example: str = "50ms, 2.5s or 20m") -> float:
    """Reads `50ms`, `2.5s`, `20m`, `6h` or `2d` as seconds.

    Args:
        text: As written.
        option: Where it stands, for what is said of a mistake.
        example: Of what this option usually holds.

    Raises:
        InvalidInput: It is no time, or not above 0.
    """
    match = _DURATION.fullmatch(text.strip())
    unit = match[2].lower() if match else ""
    if match is None or unit not in _SECONDS:
        raise InvalidInput(f"{option} {text[:40]}: expected a time such as {example}")
    seconds = float(match[1]) * _SECONDS[unit]
    if not 0 < seconds < math.inf:
        raise InvalidInput(f"{option} {text[:40]}: expected a time above 0, such as {example}")
    return seconds
