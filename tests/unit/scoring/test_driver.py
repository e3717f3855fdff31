"""The loop between schedule and fleet."""

from __future__ import annotations

import pytest
from fake_fleet import FakeFleet, unit

from graphkiln_backend.scoring.errors import ClaimLost
from graphkiln_backend.scoring.events import Summary
from graphkiln_backend.scoring.run import drive
from graphkiln_backend.scoring.schedule import Schedule


def test_a_run_without_units_asks_nobody() -> None:
    fleet = FakeFleet(size=1)
    drive(Schedule(iter([]), lambda _: None, Summary()), fleet, lambda: None, fleet.clock)
    assert fleet.most_in_flight == 0


def test_a_run_that_lost_its_claim_stops_at_once() -> None:
    stays = 0

    def stay() -> None:
        nonlocal stays
        stays += 1
        if stays > 5:
            raise ClaimLost("another run took over")

    fleet = FakeFleet()
    schedule = Schedule(iter([unit(number) for number in range(100)]), lambda _: None, Summary())
    with pytest.raises(ClaimLost):
        drive(schedule, fleet, stay, fleet.clock)
    assert sum(fleet.commits.values()) < 10
