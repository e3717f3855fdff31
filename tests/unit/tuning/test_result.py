"""The Pareto front and the knee."""

from __future__ import annotations

import math

import pytest

from graphkiln.tuning.candidate import ENGINE, Candidate
from graphkiln.tuning.result import CandidateScore, Point, Row, knee, pareto_front
from graphkiln.tuning.statistics import Interval, Latency
from graphkiln.tuning.trials import ClosedLoop, Measured, OpenLoop


def point(rate: float, p99_s: float, memory: int | None = 1) -> Point:
    latency = Latency(count=1000, mean_s=0.01, p50_s=0.01, p90_s=0.01, p99=Interval.exact(p99_s), p999_s=1.0)
    measured = Measured(latency=latency, throughput=Interval.exact(rate), seconds=1.0, memory_bytes=memory)
    return Point(load=OpenLoop(rate), measured=measured)


def row(name: str, rate: float, p99_s: float, memory: int | None = 1, lost: float = 0.0) -> Row:
    scored = CandidateScore(
        candidate=Candidate.of({ENGINE: name}), score=Interval.exact(rate), points=(point(rate, p99_s, memory),)
    )
    return Row(scored=scored, score="", limit="", accuracy_lost=lost)


def names(rows: tuple[Row, ...]) -> str:
    return "".join(str(each.scored.candidate[ENGINE]) for each in rows)


def test_only_what_another_beats_in_every_respect_is_not_in_front() -> None:
    rows = [
        row("a", 100, 0.05),
        row("b", 90, 0.05),  # beaten by a
        row("c", 90, 0.04),
        row("d", 80, 0.09, memory=0),
        row("e", 100, 0.06, lost=0.1),  # beaten by a
    ]
    assert names(pareto_front(rows)) == "acd"


def test_equal_rows_are_both_in_front() -> None:
    assert names(pareto_front([row("a", 100, 0.05), row("b", 100, 0.05)])) == "ab"


def test_memory_that_is_unknown_says_nothing() -> None:
    assert names(pareto_front([row("a", 100, 0.05, None), row("b", 90, 0.05, None)])) == "a"


def test_what_reached_nothing_is_not_in_front() -> None:
    none = CandidateScore(candidate=Candidate.of({}), score=Interval(50.0, 0.0, 60.0), points=(point(50, 0.01),))
    assert pareto_front([Row(scored=none, score="", limit="")]) == ()


def test_the_point_that_counts_is_the_highest_rate_that_was_reached() -> None:
    points = (point(50, 0.01), point(80, 0.04), point(120, 0.5))
    scored = CandidateScore(candidate=Candidate.of({}), score=Interval(90, 80, 120), points=points)
    assert Row(scored=scored, score="", limit="").best_point == points[1]
    closed = Point(load=ClosedLoop(1), measured=points[0].measured)
    scored = CandidateScore(candidate=Candidate.of({}), score=Interval(90, 0, 120), points=(points[2], closed))
    assert Row(scored=scored, score="", limit="").best_point == closed


def test_the_knee_is_where_latency_turns_up() -> None:
    curve = [point(rate, 0.01 / (1 - rate / 100)) for rate in (10, 30, 50, 70, 80, 90, 97)]
    assert knee(curve) in (80, 90)
    assert knee(list(reversed(curve))) == knee(curve)


@pytest.mark.parametrize(
    "points", [[(10, 0.01), (20, 0.02)], [(10, 0.01), (20, 0.02), (30, 0.03)], [(1, 0.3), (2, 0.2), (3, 0.1)]]
)
def test_a_line_has_none(points: list[tuple[float, float]]) -> None:
    assert knee([point(rate, p99_s) for rate, p99_s in points]) is None


def test_endless_latencies_are_no_part_of_a_curve() -> None:
    curve = [point(10, 0.01), point(50, 0.011), point(90, 0.1), point(100, math.inf)]
    assert knee(curve) == 50
