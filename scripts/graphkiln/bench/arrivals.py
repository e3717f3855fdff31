"""Arrival times of an open loop: Poisson, constant, bursts, or recorded. In ascending seconds from the start."""

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

Arrivals = npt.NDArray[np.float64]  # `[requests]`: seconds after the start

_MAX_FILE_BYTES = 256 * MIB
_TIME_KEY = "time"
_FORMAT_HINT = "expected one time per line: seconds, or a date with a time"


def poisson(rate: float, seconds: float, seed: int = 0) -> Arrivals:
    """Generate a reproducible Poisson process with `rate` requests per second on average."""
    generator = np.random.default_rng(seed)
    arrivals = np.cumsum(generator.exponential(1 / rate, int(rate * seconds * 1.2) + 100))
    return _before(arrivals, seconds)


def constant(rate: float, seconds: float) -> Arrivals:
    """Generate `rate` requests per second at constant intervals."""
    return _before(np.arange(int(np.ceil(rate * seconds)) + 1) / rate, seconds)


def bursts(rate: float, seconds: float, size: int, seed: int = 0) -> Arrivals:
    """Generate bursts of `size` requests at random times; `rate` is in requests per second, not bursts."""
    return np.repeat(poisson(rate / size, seconds, seed), size)


def read_trace(file: Path) -> Arrivals:
    """Read recorded arrival times; the first request is due at 0.

    The file has one line per request, in any order: a number of seconds, an ISO 8601 date and time, a CSV row with one
    of these in the column `time` (by default the first), or a JSON object with one of these as `time`.

    Raises:
        InvalidInput: The file cannot be read, or a line has no time.
    """
    try:
        lines = read_bytes(file, _MAX_FILE_BYTES).decode("utf-8-sig", "replace").splitlines()
    except OSError as error:
        raise InvalidInput(f"{file} cannot be read: {error}", hint=_FORMAT_HINT) from error
    times = np.sort(np.array(list(_parse_lines(file, lines)), np.float64))
    if not times.size:
        raise InvalidInput(f"{file} contains no arrival times", hint=_FORMAT_HINT)
    if not np.isfinite(times).all():
        raise InvalidInput(f"{file} contains a time that is not finite")
    since_first: Arrivals = times - times[0]
    return since_first


def _before(arrivals: Arrivals, seconds: float) -> Arrivals:
    before: Arrivals = arrivals[arrivals < seconds]
    return before


def _parse_lines(file: Path, lines: list[str]) -> Iterator[float]:
    column = 0
    for number, line in enumerate(lines, 1):
        if not line.strip() or line.startswith("#"):
            continue
        try:
            cell = str(json.loads(line)[_TIME_KEY]) if line.startswith("{") else _cells(line.strip())[column]
            yield _parse_time(cell)
        except (ValueError, KeyError, TypeError, IndexError, RecursionError) as error:
            if number > 1 or line.startswith("{"):
                raise InvalidInput(
                    f"{file}, line {number}: {line[:60]!r} has no arrival time", hint=_FORMAT_HINT
                ) from error
            names = _cells(line)  # the header of a CSV file
            column = names.index(_TIME_KEY) if _TIME_KEY in names else 0


def _cells(line: str) -> list[str]:
    """Split a CSV row into cells; empty for a malformed row."""
    try:
        row = next(csv.reader([line], skipinitialspace=True), [])
    except csv.Error:
        return []
    return [cell.strip() for cell in row]


def _parse_time(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return datetime.fromisoformat(text).timestamp()
