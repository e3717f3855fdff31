"""Rates and shares as people write them, and values of `--fix`."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

from graphkiln.tuning.candidate import (
    INSTANCES,
    MAX_BATCH_SIZE,
    NOTHING,
    PREFERRED,
    QUEUE_DELAY_US,
    SPIN,
    STREAMS,
    THREADS,
    Candidate,
    Value,
)
from graphkiln_backend.graph.errors import InvalidInput
from graphkiln_backend.graph.text import did_you_mean

_NUMBER = re.compile(r"(\d+(?:\.\d+)?(?:e[+-]?\d+)?)\s*(.*)", re.IGNORECASE)
_PER = {"": 1.0, "/s": 1.0, "/m": 1 / 60, "/min": 1 / 60, "/h": 1 / 3600}
_LEAST = {THREADS: 1, STREAMS: 1, INSTANCES: 1, MAX_BATCH_SIZE: 0, QUEUE_DELAY_US: -1}
"""The least that a key can be set to."""
_SWITCHES = {"on": True, "off": False, "true": True, "false": False}


def parse_rate(text: str, option: str) -> float:
    """Reads `200/s`, `200` or `12000/min` as requests per second.

    Raises:
        InvalidInput: It is no rate, or not above 0.
    """
    return _parse(text, option, _PER, "requests per second such as 200/s")


def parse_share(text: str, option: str) -> float:
    """Reads `0.5%` as 0.005.

    Raises:
        InvalidInput: It is no share below 100%.
    """
    share = _parse(text, option, {"%": 0.01}, "a share such as 0.5%", least=0.0)
    if share >= 1:
        raise InvalidInput(f"{option} {text}: expected less than 100%")
    return share


def check_price(price: float | None) -> None:
    """Refuses what is no price.

    Raises:
        InvalidInput: It is not a number, or infinite.
    """
    if price is not None and not math.isfinite(price):
        raise InvalidInput(f"--price {price:g}: expected what an hour of this machine costs, such as 1.20")


def parse_fixes(texts: Sequence[str], default: Candidate) -> dict[str, Value]:
    """Reads each `KEY=VALUE` of `--fix`.

    Args:
        texts: As written.
        default: A candidate, for the keys that there are and the kind of their values.

    Raises:
        InvalidInput: One cannot be read, or two are of the same key.
    """
    fixed: dict[str, Value] = {}
    for text in texts:
        key, value = parse_fixed(text, default)
        if fixed.setdefault(key, value) != value:
            raise InvalidInput(f"--fix {text}: '{key}' has another value already", hint="give each key one value")
    return fixed


def parse_fixed(text: str, default: Candidate) -> tuple[str, Value]:
    """Reads `KEY=VALUE` of `--fix`.

    Args:
        text: As written.
        default: A candidate, for the keys that there are and the kind of their values.

    Raises:
        InvalidInput: There is no such key, or the value is of another kind.
    """
    key, equals, value = text.partition("=")
    if not equals or not value:
        raise InvalidInput(f"--fix {text}: a value is missing", hint="--fix KEY=VALUE")
    if key not in default:
        raise InvalidInput(
            f"--fix {text}: '{key}' is not tuned for this model", hint=did_you_mean(key, list(default.values))
        )
    return key, _parse_value(text, key, value, default[key])


def _parse_value(text: str, key: str, value: str, example: Value) -> Value:
    if key == SPIN:
        if value not in _SWITCHES:
            raise InvalidInput(f"--fix {text}: expected on or off")
        return _SWITCHES[value]
    try:
        if key == PREFERRED:
            return tuple(int(part) for part in value.split("+")) if value != NOTHING else ()
        number = int(value) if isinstance(example, int) else None
    except ValueError:
        raise InvalidInput(f"--fix {text}: expected a whole number", hint=f"such as {key}={example}") from None
    if number is not None and number < _LEAST.get(key, 0):
        raise InvalidInput(f"--fix {text}: expected {_LEAST.get(key, 0)} or more")
    return value if number is None else number


def _parse(text: str, option: str, units: dict[str, float], expected: str, least: float = math.ulp(0.0)) -> float:
    match = _NUMBER.fullmatch(text.strip())
    unit = match[2].strip().lower() if match else ""
    if match is None or unit not in units:
        raise InvalidInput(f"{option} {text}: expected {expected}")
    value = float(match[1]) * units[unit]
    if not least <= value < math.inf:
        raise InvalidInput(f"{option} {text}: expected {expected}, above 0")
    return value
