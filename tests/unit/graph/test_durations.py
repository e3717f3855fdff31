"""Durations as people write them."""

from __future__ import annotations

import pytest

from graphkiln_backend.graph.errors import InvalidInput
from graphkiln_backend.graph.text import parse_duration


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("50ms", 0.05), ("2.5s", 2.5), ("20m", 1200), ("20 min", 1200), ("6h", 21600), ("1.5d", 129600),
        ("500 us", 5e-4), ("1e3MS", 1),
    ],
)  # fmt: skip
def test_durations(text: str, seconds: float) -> None:
    assert parse_duration(text, "--p99") == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["", "50", "6", "h", "ms", "-5ms", "-1h", "0m", "5 apples", "nan", "inf ms", "1e999s"])
def test_what_is_no_time_is_refused_with_the_option_and_an_example(text: str) -> None:
    with pytest.raises(InvalidInput, match=r"--within .*: expected a time.*such as 90m, 6h or 2d"):
        parse_duration(text, "--within", "90m, 6h or 2d")
