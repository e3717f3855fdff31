"""Coverage of bounds: compared with scipy, and on simulated queues with correlated requests."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from graphkiln.tuning.statistics import (
    BLOCKS,
    Latency,
    Seconds,
    fewest_slower,
    mean_interval,
    most_slower,
    quantile_bounds,
    requests_needed,
)

RUNS = 300


def queue(generator: np.random.Generator, utilization: float, requests: int) -> Seconds:
    """Latencies of M/M/1 with a mean service time of `utilization` and one arrival a second, after a warm-up."""
    gaps = generator.exponential(1.0, requests + 2000)
    service = generator.exponential(utilization, requests + 2000)
    walk = np.concatenate([[0.0], np.cumsum(service[:-1] - gaps[1:])])
    waits = walk - np.minimum.accumulate(walk)  # Lindley's recursion
    return (waits + service)[2000:]


@pytest.mark.parametrize("count", [1, 298, 299, 5000])
def test_counts_match_the_binomial(count: int) -> None:
    slower = stats.binom(count, 0.01)
    allowed = most_slower(count)
    if allowed is None:
        assert slower.cdf(0) > 0.05
    else:
        assert slower.cdf(allowed) <= 0.05 < slower.cdf(allowed + 1)
    needed = fewest_slower(count)
    assert slower.sf(needed - 1) <= 0.05 < slower.sf(needed - 2)


def test_requests_needed() -> None:
    assert requests_needed() == 299
    assert requests_needed(1) == 473
    assert requests_needed(10) == next(n for n in range(1600, 2000) if stats.binom(n, 0.01).cdf(10) <= 0.05)
    assert requests_needed(quantile=0.5) == 5


def drifting(generator: np.random.Generator, requests: int) -> Seconds:
    """Latencies on a machine whose speed changes a dozen times."""
    speed = np.repeat(np.exp(generator.normal(0, 0.5, 12)), requests // 12)
    return speed * np.exp(generator.normal(0, 0.3, speed.size))


@pytest.mark.parametrize("utilization", [0.6, 0.9])
def test_wide_bounds_of_few_requests_hold(utilization: float) -> None:
    generator = np.random.default_rng(4)
    bounds = [Latency.of(queue(generator, utilization, 1000)).p99_at_most_s for _ in range(RUNS)]
    true = -math.log(0.01) / (1 / utilization - 1)
    assert sum(each >= true for each in bounds) >= 0.9 * RUNS


def test_wide_bound_with_changing_speed() -> None:
    generator = np.random.default_rng(5)
    true = np.quantile(np.concatenate([drifting(generator, 1200) for _ in range(500)]), 0.99)
    bounds = np.array([Latency.of(drifting(generator, 1200)).p99_at_most_s for _ in range(RUNS)])
    assert (bounds >= true).mean() >= 0.95
    assert np.median(bounds) < 6 * true


def test_bounds_of_independent_requests_hold() -> None:
    generator, count = np.random.default_rng(500), 500
    bounds = [quantile_bounds(generator.exponential(1.0, count)) for _ in range(RUNS)]
    true = -math.log(0.01)
    assert sum(each.upper >= true for each in bounds) >= 0.95 * RUNS
    assert sum(each.lower <= true for each in bounds) >= 0.95 * RUNS


def test_bounds_of_queued_requests_hold() -> None:
    generator, utilization = np.random.default_rng(1), 0.8
    bounds = [quantile_bounds(queue(generator, utilization, 4000)) for _ in range(RUNS)]
    true = -math.log(0.01) / (1 / utilization - 1)  # the time in M/M/1 is exponential
    assert sum(each.upper >= true for each in bounds) >= 0.95 * RUNS
    assert sum(each.lower <= true for each in bounds) >= 0.95 * RUNS


def test_queued_requests_are_not_independent() -> None:
    """Negative control: without blocks, the bounds do not hold."""
    generator = np.random.default_rng(1)
    shuffled = [quantile_bounds(generator.permutation(queue(generator, 0.8, 4000))) for _ in range(RUNS)]
    true = -math.log(0.01) / (1 / 0.8 - 1)
    assert sum(each.upper >= true for each in shuffled) < 0.9 * RUNS


def test_failed_requests_count_as_infinite() -> None:
    latencies = np.full(1000, 0.01)
    latencies[::50] = math.inf
    summary = Latency.of(latencies)
    assert math.isinf(summary.p99.lower)
    assert summary.mean_s == pytest.approx(0.01)
    assert summary.p50_s == 0.01
    assert math.isinf(Latency.of(np.full(5, math.inf)).mean_s)
    assert summary.p99_words == "more than 1 in 100 of 1000 requests failed or were not sent in time"
    assert Latency.of(np.full(1000, 0.01)).p99_words == "p99 was 10 ms"


def test_coverage_of_interval_of_mean() -> None:
    generator = np.random.default_rng(3)
    intervals = [mean_interval(generator.normal(10.0, 2.0, BLOCKS)) for _ in range(2000)]
    assert 0.935 <= np.mean([each.lower <= 10 <= each.upper for each in intervals]) <= 0.965
