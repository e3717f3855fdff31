"""What is said to limit a configuration is what the figures show."""

from __future__ import annotations

from dataclasses import replace

import pytest

from graphkiln.tuning.candidate import QUEUE_DELAY_US, Candidate
from graphkiln.tuning.result import CandidateScore, Point
from graphkiln.tuning.search import limit_of
from graphkiln.tuning.statistics import Interval, Latency
from graphkiln.tuning.target import Target
from graphkiln.tuning.trials import Bare, Measured, OpenLoop

BARE, TARGET = Bare(batch_s={1: 0.01}), Target(p99_s=0.05)
LATENCY = Latency(count=1000, mean_s=0.02, p50_s=0.015, p90_s=0.05, p99=Interval.exact(0.06), p999_s=0.1)
MEASURED = Measured(latency=LATENCY, throughput=Interval.exact(100.0), seconds=10.0)


def limit(measured: Measured, *, delay_us: int = 0) -> str:
    candidate = Candidate.of({QUEUE_DELAY_US: delay_us})
    point = Point(load=OpenLoop(100.0), measured=measured)
    scored = CandidateScore(candidate=candidate, score=Interval(90, 80, 100), points=(point,))
    return limit_of(scored, BARE, TARGET, cores=2)


@pytest.mark.parametrize(
    ("measured", "words"),
    [
        (MEASURED, "the queue: half of the requests take 15 ms"),
        (replace(MEASURED, server_cores=1.95), "the cores: the server keeps 1.9 of 2 busy"),
        (replace(MEASURED, throughput=Interval.exact(60.0)), "throughput: 60 of 100 requests per second"),
        (replace(MEASURED, errors={"Overloaded": 7}), "errors: 7 requests ended with Overloaded"),
        (replace(MEASURED, latency=replace(LATENCY, p99=Interval.exact(0.015))), "the model: a run of one sample"),
        (replace(MEASURED, latency=replace(LATENCY, p50_s=0.04)), "a run under load takes 40 ms, alone 10 ms"),
    ],
)
def test_the_part_that_takes_the_time_is_named(measured: Measured, words: str) -> None:
    assert limit(measured).startswith(words)


def test_a_batcher_that_waits_is_named() -> None:
    assert limit(MEASURED, delay_us=40_000).startswith("the batcher: it waits up to 40 of 60 ms")


def test_what_was_not_measured_is_limited_by_why() -> None:
    scored = CandidateScore(candidate=Candidate.of({}), score=Interval.exact(0.0), lost="it did not load")
    assert limit_of(scored, BARE, TARGET, cores=2) == "it did not load"
