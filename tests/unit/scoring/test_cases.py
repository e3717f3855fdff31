"""What is known of a unit in trouble."""

from __future__ import annotations

from fake_fleet import unit

from graphkiln_backend.scoring.outcomes import Cause, Span
from graphkiln_backend.scoring.schedule import MOST_GUILTY_ROWS, Case, wait_s


def test_the_search_begins_where_the_worker_was() -> None:
    case = Case(unit=unit(1, rows=1000))
    case.blame(case.attempt(60.0), alone=True, reached=500, reason="hung for 60 s")
    assert case.attempt(60.0).probe == Span(start=436, stop=500)


def test_a_unit_with_very_many_guilty_rows_is_given_up() -> None:
    case = Case(unit=unit(1, rows=1000), reason="hung for 60 s")
    case.quarantined = dict.fromkeys(range(MOST_GUILTY_ROWS), "hung for 60 s")
    assert not case.hopeless
    case.quarantined[999] = "hung for 60 s"
    assert "more than 50 rows" in case.hopeless


def test_a_unit_is_tried_again_later_and_later() -> None:
    waits = [wait_s({Cause.SOURCE: failures}, Cause.SOURCE) for failures in range(1, 12)]
    assert waits == sorted(waits)
    assert (waits[0], waits[-1]) == (1.0, 60.0)
