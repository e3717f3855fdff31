"""Sums of two shards: rows of both ways, and that both really sum."""

from __future__ import annotations

import os

import pytest
from transport_speed import _row, gloo_pair, in_process

CORE = min(os.sched_getaffinity(0))


def test_a_row_says_how_often_faster_ours_is() -> None:
    asked: list[tuple[int, int]] = []

    def measure(elements: int, runs: int) -> float:
        asked.append((elements, runs))
        return 1e-3

    row = _row("8 KiB", 2048, {"in the process": measure, "gloo": lambda *_: 2e-3}, rounds=2, seconds=0.1)
    assert row == {"sum": "8 KiB", "in the process, us": 1000.0, "gloo, us": 2000.0, "ratio": 2.0, "spread": 0.0}
    assert asked == [(2048, 5), (2048, 100), (2048, 100)], "as many runs as fit into the time"


def test_ours_sums_and_takes_time() -> None:
    assert 0 < in_process((CORE, CORE))(1000, 3) < 10


@pytest.mark.slow
def test_gloo_sums_and_takes_time() -> None:
    """Two processes with PyTorch."""
    with gloo_pair((CORE, CORE)) as measure:
        assert 0 < measure(1000, 3) < 60
        assert 0 < measure(1 << 20, 3) < 60
