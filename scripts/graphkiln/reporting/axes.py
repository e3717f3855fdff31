"""Axes: from values to places in a picture, with ticks at round numbers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

_TICKS = (1, 2, 5)
_MARGIN = 0.06  # of an axis, on either side of the outermost marks
_LEAST_DECADES = 0.15  # beside the outermost marks of a logarithmic axis, so that equal values have one, too


@dataclass(frozen=True, kw_only=True, slots=True)
class Axis:
    """From a value to a place in the picture.

    Attributes:
        place: Value -> units.
        ticks: Place and label of each.
    """

    place: Callable[[float], float]
    ticks: tuple[tuple[float, str], ...]


def linear_axis(values: Sequence[float], begin: float, end: float) -> Axis:
    """An axis from 0 to the largest value, with ticks at round numbers.

    Args:
        values: At least one, none below 0.
        begin: Place of 0.
        end: Place a little beyond the largest value.
    """
    most = (max(values) or 1.0) * (1 + _MARGIN)

    def place(value: float) -> float:
        return round(begin + value / most * (end - begin), 1)

    step = _round_step(most / 4)
    ticks = [number * step for number in range(int(most / step) + 1)]
    return Axis(place=place, ticks=tuple((place(tick), f"{tick:g}") for tick in ticks))


def log_axis(values: Iterable[float], begin: float, end: float) -> Axis:
    """A logarithmic axis around values, with ticks at 1, 2, 5, 10, ...

    Args:
        values: At least one, all above 0.
        begin: Place a little below the smallest value.
        end: Place a little above the largest one.
    """
    logs = [math.log10(value) for value in values]
    low, high = min(logs), max(logs)
    margin = max((high - low) * _MARGIN, _LEAST_DECADES)
    low, high = low - margin, high + margin

    def place(value: float) -> float:
        return round(begin + (math.log10(value) - low) / (high - low) * (end - begin), 1)

    powers = range(math.floor(low), math.ceil(high) + 1)
    numbers = [digit * 10.0**power for power in powers for digit in _TICKS]
    return Axis(place=place, ticks=tuple((place(n), f"{n:g}") for n in numbers if low <= math.log10(n) <= high))


def _round_step(step: float) -> float:
    power = 10.0 ** math.floor(math.log10(step))
    return next(digit * power for digit in (1, 2, 5, 10) if digit * power >= step)
