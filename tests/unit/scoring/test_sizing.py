"""How many machines a deadline asks for."""

from __future__ import annotations

import pytest

from graphkiln.scoring.sizing import size_fleet
from graphkiln_backend.scoring.errors import ScoringError


def test_a_hundred_million_rows_in_six_hours() -> None:
    sizing = size_fleet(
        100_000_000, rows_per_s=50, workers_per_machine=4, start_s=100, within_s=6 * 3600, price_per_hour=1.2
    )
    assert (sizing.machines, sizing.workers) == (24, 96)  # 1e8 / (200 * 21500) = 23.3
    assert sizing.seconds == pytest.approx(100 + 1e8 / (200 * 24))
    assert sizing.seconds <= 6 * 3600
    assert sizing.cost == pytest.approx(24 * sizing.seconds / 3600 * 1.2)


def test_one_machine_less_would_be_too_late() -> None:
    sizing = size_fleet(1_000_000, rows_per_s=10, workers_per_machine=1, start_s=60, within_s=3600)
    assert 60 + 1_000_000 / (10 * (sizing.machines - 1)) > 3600 >= sizing.seconds
    assert sizing.cost is None


def test_little_takes_one_machine() -> None:
    assert size_fleet(10, rows_per_s=10, workers_per_machine=2, start_s=1, within_s=60).machines == 1


def test_a_deadline_before_a_worker_is_ready() -> None:
    with pytest.raises(ScoringError, match="needs 90 s to be ready"):
        size_fleet(10, rows_per_s=10, workers_per_machine=2, start_s=90, within_s=60)
