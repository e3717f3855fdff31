"""Rungs: what surely loses leaves at once, what ranks low leaves with its rank, and the default stays."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from simulated_server import SimulatedServer

from graphkiln.tuning.candidate import Candidate
from graphkiln.tuning.drift import Reference
from graphkiln.tuning.result import Standing
from graphkiln.tuning.search import FINALISTS, Ladder, best_reached
from graphkiln.tuning.space import Space
from graphkiln.tuning.statistics import Interval
from graphkiln.tuning.trials import ClosedLoop


class Known:
    """A contest whose scores are the candidates' places; the second measurement is exact."""

    def __init__(self, reference: Reference, order: list[Candidate]) -> None:
        self.reference, self.order, self.seconds = reference, order, []

    def advance(self, standing: Standing, seconds: float, reached: float) -> Standing:
        del reached
        self.seconds.append(seconds)
        self.reference.measure(standing.candidate, ClosedLoop(1), seconds)
        value = float(100 - self.order.index(standing.candidate))
        is_exact = seconds > 1
        return replace(standing, score=Interval(value, value if is_exact else 0.0, value if is_exact else 200.0))

    def describe(self, score: float) -> str:
        return f"{score:g}"


@pytest.fixture
def reference(reference_of: Callable[[SimulatedServer], Reference]) -> Reference:
    return reference_of(SimulatedServer(cores=2))


def climb(reference: Reference, space: Space, keep: list[Candidate], has_time: Callable[[], bool]) -> list[Standing]:
    order = list(space.candidates[:36])
    contest = Known(reference, order)
    entered = [Standing(candidate=each, score=Interval(200, 0, 200)) for each in reversed(order)]
    return Ladder(contest, reference, has_time, keep).climb(entered, 1.0)  # type: ignore[arg-type]


def test_the_best_are_left_and_the_others_say_why(reference: Reference, space: Space) -> None:
    standings = climb(reference, space, [], lambda: True)
    assert len(standings) == 36
    left = [each.candidate for each in standings if not each.lost]
    assert left == list(space.candidates[:1]), "exact scores tell all others from the best"
    reasons = {each.candidate: each.lost for each in standings}
    assert reasons[space.candidates[35]] == "ranks 36 of 36 after 1 s"
    assert reasons[space.candidates[5]] == "95 at best, where another has 100"


def test_some_leave_only_when_they_are_surely_worse(reference: Reference, space: Space) -> None:
    last = space.candidates[35]
    standings = climb(reference, space, [last], lambda: True)
    assert next(each.lost for each in standings if each.candidate == last) == "65 at best, where another has 100"


def test_without_time_what_was_not_measured_is_out(reference: Reference, space: Space) -> None:
    turns = iter([True] * (1 + 9 + 9))  # the rung, and each of two chunks with its measurements
    standings = climb(reference, space, [], lambda: next(turns, False))
    assert sum("budget was spent" in each.lost for each in standings) == 36 - 16
    assert sum(not each.lost for each in standings) >= FINALISTS


def test_the_best_of_none_is_nothing() -> None:
    assert best_reached([]) == float("-inf")
