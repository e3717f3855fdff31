"""Due times of the requests of an open loop: at random, at even distances, in bursts, or recorded.

Each function returns seconds after the start, in ascending order.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

import numpy as np
import numpy.typing as npt

from graphkiln_backend.graph.errors import InvalidInput
from graphkiln_backend.graph.files import MIB, read_bytes

Moments = npt.NDArray[np.float64]  # `[requests]`: seconds after the start

_LIMIT = 256 * MIB
_KEY = "time"
_WHAT = "one time for each line: seconds, or a date with a time"


def poisson(rate: float, seconds: float, seed: int = 0) -> Moments:
    """A Poisson process: exponential times between requests, the same at every call.

    Args:
        rate: Requests per second, on average.
        seconds: How long they come.
        seed: Another one gives other moments.
    """
    generator = np.random.default_rng(seed)
    moments = np.cumsum(generator.exponential(1 / rate, int(rate * seconds * 1.2) + 100))
    return _before(moments, seconds)


def constant(rate: float, seconds: float) -> Moments:
    """Requests at even distances; arguments as for `poisson`."""
    return _before(np.arange(int(np.ceil(rate * seconds)) + 1) / rate, seconds)


def bursts(rate: float, seconds: float, size: int, seed: int = 0) -> Moments:
    """Requests that come `size` at a time, at random moments; `rate` counts requests, not bursts."""
    return np.repeat(poisson(rate / size, seconds, seed), size)


def read_trace(file: Path) -> Moments:
    """Read recorded arrival times; the first request is due at 0.

    The file has one line for each request: a number of seconds, a date with a time (ISO 8601), a row of a CSV file
    whose first column is one of these, or a JSON object with one of these as `time`. A first line of other text is the
    heading of a CSV file; where it names a column `time`, that one is read. The order of the lines does not matter.

    Raises:
        InvalidInput: It cannot be read, or a line has no time; the message says which.
    """
    try:
        lines = read_bytes(file, _LIMIT).decode("utf-8-sig", "replace").splitlines()
    except OSError as error:
        raise InvalidInput(f"{file} cannot be read: {error}", hint=f"expected {_WHAT}") from error
    moments = np.sort(np.array(list(_parse_lines(file, lines)), np.float64))
    if not moments.size:
        raise InvalidInput(f"{file} holds no arrival times", hint=f"expected {_WHAT}")
    if not np.isfinite(moments).all():
        raise InvalidInput(f"{file} holds a time that is not finite")
    since_first: Moments = moments - moments[0]
    return since_first


def _before(moments: Moments, seconds: float) -> Moments:
    before: Moments = moments[moments < seconds]
    return before


def _parse_lines(file: Path, lines: list[str]) -> Iterator[float]:
    column = 0
    for number, line in enumerate(lines, 1):
        if not line.strip() or line.startswith("#"):
            continue
        try:
            yield _parse_line(line.strip(), column)
        except (ValueError, KeyError, TypeError, IndexError, RecursionError) as error:
            if number > 1 or line.startswith("{"):
                raise InvalidInput(
                    f"{file}, line {number}: {line[:60]!r} has no arrival time", hint=f"expected {_WHAT}"
                ) from error
            names = _cells(line)
            column = names.index(_KEY) if _KEY in names else 0


def _parse_line(line: str, column: int) -> float:
    if line.startswith("{"):
        return _parse_moment(str(json.loads(line)[_KEY]))
    return _parse_moment(_cells(line)[column])


def _cells(line: str) -> list[str]:
    """Cells of a row of a CSV file; none of a malformed row."""
    try:
        row = next(csv.reader([line], skipinitialspace=True), [])
    except csv.Error:
        return []
    return [cell.strip() for cell in row]


def _parse_moment(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return datetime.fromisoformat(text).timestamp()
