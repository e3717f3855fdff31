"""How long a worker may be silent."""

from __future__ import annotations

from graphkiln_backend.scoring.schedule import FIRST_S, FLOOR_S, Patience


def test_before_anything_is_measured_there_is_much_patience() -> None:
    assert Patience().seconds == FIRST_S


def test_it_follows_the_slowest_of_the_last_units() -> None:
    patience = Patience()
    for seconds in (1.0, 2.0, 3.0):
        patience.learn(seconds)
    patience.learn(100.0)
    assert patience.seconds == 300.0
    for _ in range(50):
        patience.learn(1.0)
    assert patience.seconds == FLOOR_S
