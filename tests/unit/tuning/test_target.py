"""Validation of targets, and parsing of their options."""

from __future__ import annotations

from typing import Any

import pytest

from graphkiln.tuning.candidate import Candidate, Value, parse_fixed
from graphkiln.tuning.target import Objective, Target, parse_rate
from graphkiln_backend.graph.errors import InvalidInput


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"p99_s": 7200.0}, "--p99 of 7200 s is out of range"),
        ({"p99_s": 1.0, "rate": 1e8}, "--rate of 1e"),
    ],
)
def test_invalid_target_is_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        Target(**values)


def test_low_rate_needs_a_longer_budget() -> None:
    slow = Target(p99_s=1.0, rate=0.05, objective=Objective.LATENCY)
    with pytest.raises(InvalidInput, match="--budget 34m"):
        slow.check_budget(1200.0)
    slow.check_budget(2000.0)
    Target(p99_s=1.0).check_budget(1.0)


# Values of options.

DEFAULT = Candidate.of({"engine": "onnxruntime", "threads": 2, "spin": True, "preferred_batch_sizes": (4,)})


@pytest.mark.parametrize(("text", "rate"), [("200/s", 200), ("200", 200), ("12000/min", 200), ("36/h", 0.01)])
def test_rates(text: str, rate: float) -> None:
    assert parse_rate(text, "--rate") == pytest.approx(rate)


@pytest.mark.parametrize(
    ("text", "key", "value"),
    [
        ("engine=openvino", "engine", "openvino"),
        ("threads=1", "threads", 1),
        ("spin=off", "spin", False),
        ("preferred_batch_sizes=2+8", "preferred_batch_sizes", (2, 8)),
        ("preferred_batch_sizes=none", "preferred_batch_sizes", ()),
    ],
)
def test_fixed_values_have_the_type_of_their_key(text: str, key: str, value: Value) -> None:
    assert parse_fixed(text, DEFAULT) == (key, value)
