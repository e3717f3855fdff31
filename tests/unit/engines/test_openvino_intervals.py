"""The intervals of OpenVINO's operations, beside what numpy computes from numbers in them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import openvino
import pytest
from openvino import opset13

from graphkiln_backend.engines.openvino_integers import ANYTHING, RULES, Interval, hull

RANGES = [Interval(-3, 5), Interval(0, 4), Interval(-7, -2), Interval(1, 1)]
COMPUTED: dict[str, Callable[[int, int], float]] = {
    "Add": lambda a, b: a + b,
    "Subtract": lambda a, b: a - b,
    "Multiply": lambda a, b: a * b,
    "SquaredDifference": lambda a, b: (a - b) ** 2,
    "Divide": lambda a, b: int(a / b) if b else 0,
    "Minimum": min,
    "Maximum": max,
    "Mod": lambda a, b: math.fmod(a, b) if b else 0,
    "FloorMod": lambda a, b: a % b if b else 0,
    "Power": lambda a, b: a**b if b >= 0 else 0,
    "BitwiseLeftShift": lambda a, b: a * 2 ** max(b, 0),
}
NODE = opset13.constant([1])


def numbers(interval: Interval) -> range:
    return range(int(interval.least), int(interval.most) + 1)


@pytest.mark.parametrize("kind", COMPUTED)
def test_whatever_is_computed_lies_within(kind: str) -> None:
    for left, right in itertools.product(RANGES, RANGES):
        least, most = RULES[kind](NODE, [left, right])
        for a, b in itertools.product(numbers(left), numbers(right)):
            assert least <= COMPUTED[kind](a, b) <= most, (kind, a, b)


@pytest.mark.parametrize(("kind", "within"), [("Abs", (0, 7)), ("Negative", (2, 7)), ("Sign", (-1, 1))])
def test_of_one_number(kind: str, within: tuple[float, float]) -> None:
    assert RULES[kind](NODE, [Interval(-7, -2)]) == within


def test_a_sum_of_all_along_its_axes() -> None:
    data = opset13.parameter([3, 5], openvino.Type.i64)
    summed = opset13.reduce_sum(data, opset13.constant([0, 1]))
    assert RULES["ReduceSum"](summed, [Interval(-2, 3)]) == (-30, 45)
    assert RULES["ReduceSum"](opset13.reduce_sum(data, opset13.constant([1])), [Interval(1, 3)]) == (1, 15)


def test_a_varying_dimension_counts_as_long() -> None:
    data = opset13.parameter(openvino.PartialShape([-1, 5]), openvino.Type.i64)
    assert RULES["CumSum"](opset13.cumsum(data, opset13.constant(0)), [Interval(0, 1)]) == (0, 1 << 16)


def test_between_the_limits_of_a_clamp() -> None:
    clamp = opset13.clamp(opset13.parameter([1], openvino.Type.f32), 0.0, 5.0)
    assert RULES["Clamp"](clamp, [Interval(*ANYTHING)]) == (0, 5)


def test_the_hull_of_what_nobody_knows_is_anything() -> None:
    assert hull(RANGES) == (-7, 5)
    assert hull(RANGES, known=False) == hull([]) == ANYTHING
    assert Interval(-(2**31), 2**31 - 1).fits
    assert not Interval(0, 2**31).fits
    assert Interval(-7, 2).size == 7
