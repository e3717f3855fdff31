"""The Pareto front, the knee and the bottleneck of a candidate."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from tuned import exact

from graphkiln.tuning.candidate import ENGINE, QUEUE_DELAY_US, Candidate
from graphkiln.tuning.contest import CandidateScore, Point
from graphkiln.tuning.result import Row, closest_row, knee, limit_of, pareto_front
from graphkiln.tuning.statistics import Interval, Latency
from graphkiln.tuning.target import Objective, Target
from graphkiln.tuning.trials import Measured, OpenLoop, SessionTiming

TARGET = Target(p99_s=0.05)
BY_LATENCY = Target(p99_s=0.05, rate=60.0, objective=Objective.LATENCY)


def point(rate: float, p99_s: float, memory: int | None = 1) -> Point:
    latency = Latency(count=1000, mean_s=0.01, p50_s=0.01, p99=exact(p99_s))
    measured = Measured(latency=latency, throughput=exact(rate), seconds=1.0, memory_bytes=memory)
    return Point(load=OpenLoop(rate), measured=measured)


def row(name: str, rate: float, p99_s: float, memory: int | None = 1, lost: float = 0.0) -> Row:
    scored = CandidateScore(
        candidate=Candidate.of({ENGINE: name}), score=exact(rate), points=(point(rate, p99_s, memory),)
    )
    return Row(scored=scored, score="", limit="", accuracy_lost=lost)


def names(*rows: Row) -> str:
    return "".join(str(each.scored.candidate[ENGINE]) for each in pareto_front(rows, TARGET))


def test_pareto_front() -> None:
    beaten = row("b", 90, 0.05), row("e", 100, 0.06, lost=0.1)
    assert names(row("a", 100, 0.05), *beaten, row("c", 90, 0.04), row("d", 80, 0.09, memory=0)) == "acd"
    assert names(row("a", 100, 0.05), row("b", 100, 0.05)) == "ab"
    assert names(row("a", 100, 0.05, None), row("b", 90, 0.05, None)) == "a"
    missed = replace(row("a", 50, 0.01), scored=replace(row("a", 50, 0.01).scored, score=Interval(50, 0, 60)))
    assert names(missed) == ""


def test_closest_row() -> None:
    fast, slow, missed = row("a", 90, 0.07), row("b", 10, 0.01), row("c", 0.0, 0.005)
    assert closest_row([fast, slow, missed], TARGET) is fast
    assert closest_row([missed], TARGET) is missed
    assert closest_row([], TARGET) is None


def test_knee_of_a_queue() -> None:
    curve = [point(rate, 0.01 / (1 - rate / 100)) for rate in (10, 30, 50, 70, 80, 90, 97)]
    assert knee(curve) in (80, 90)
    assert knee([point(10, 0.01), point(50, 0.011), point(90, 0.1), point(100, math.inf)]) == 50


LATENCY = Latency(count=1000, mean_s=0.02, p50_s=0.015, p99=exact(0.06))
MEASURED = Measured(latency=LATENCY, throughput=exact(100.0), seconds=10.0)


@pytest.mark.parametrize(
    ("measured", "delay_us", "words"),
    [
        (MEASURED, 0, "the queue: the median is 15 ms"),
        (MEASURED, 40_000, "the batcher: it waits up to 40 of 60 ms"),
        (replace(MEASURED, server_cores=1.95), 0, "the cores: the server uses 1.9 of 2"),
        (replace(MEASURED, throughput=exact(60.0)), 0, "throughput: 60 of 100 requests per second"),
        (replace(MEASURED, errors={"Overloaded": 7}), 0, "errors: 7 requests ended with Overloaded"),
        (replace(MEASURED, latency=replace(LATENCY, p99=exact(0.015))), 0, "the model: one sample takes"),
        (
            replace(MEASURED, latency=replace(LATENCY, p50_s=0.04)),
            0,
            "the model under load: it takes 40 ms, alone 10 ms",
        ),
    ],
)
def test_bottleneck(measured: Measured, delay_us: int, words: str) -> None:
    points = (Point(load=OpenLoop(100.0), measured=measured),)
    scored = CandidateScore(
        candidate=Candidate.of({QUEUE_DELAY_US: delay_us}), score=Interval(90, 80, 100), points=points
    )
    assert limit_of(scored, SessionTiming(batch_s={1: 0.01}), TARGET, cores=2).startswith(words)


def test_bottleneck_without_measurement_is_the_reason() -> None:
    scored = CandidateScore(candidate=Candidate.of({}), score=exact(0.0), lost="it did not load")
    assert limit_of(scored, SessionTiming(batch_s={1: 0.01}), TARGET, cores=2) == "it did not load"


@pytest.mark.parametrize(
    "points", [[(10, 0.01), (20, 0.02)], [(10, 0.01), (20, 0.02), (30, 0.03)], [(1, 0.3), (2, 0.2), (3, 0.1)]]
)
def test_line_has_no_knee(points: list[tuple[float, float]]) -> None:
    assert knee([point(rate, p99_s) for rate, p99_s in points]) is None
