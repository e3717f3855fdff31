"""Bounds hold as often as they say: beside scipy, and on simulated queues whose requests wait for each other."""

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


@pytest.mark.parametrize("count", [1, 50, 298, 299, 300, 1000, 5000])
def test_counts_are_those_of_the_binomial(count: int) -> None:
    slower = stats.binom(count, 0.01)
    allowed = most_slower(count)
    if allowed is None:
        assert slower.cdf(0) > 0.05
    else:
        assert slower.cdf(allowed) <= 0.05 < slower.cdf(allowed + 1)
    needed = fewest_slower(count)
    assert slower.sf(needed - 1) <= 0.05 < slower.sf(needed - 2)


def test_how_many_requests_a_bound_takes() -> None:
    assert requests_needed() == 299
    assert requests_needed(1) == 473
    assert requests_needed(10) == next(n for n in range(1600, 2000) if stats.binom(n, 0.01).cdf(10) <= 0.05)
    assert requests_needed(quantile=0.5) == 5


def drifting(generator: np.random.Generator, requests: int) -> Seconds:
    """Latencies on a machine whose speed changes a dozen times."""
    speed = np.repeat(np.exp(generator.normal(0, 0.5, 12)), requests // 12)
    return speed * np.exp(generator.normal(0, 0.3, speed.size))


@pytest.mark.parametrize("utilization", [0.3, 0.6, 0.8, 0.9])
def test_bounds_of_few_requests_of_a_queue_hold_nine_times_of_ten(utilization: float) -> None:
    generator = np.random.default_rng(4)
    bounds = [Latency.of(queue(generator, utilization, 1000)).p99_at_most_s for _ in range(RUNS)]
    true = -math.log(0.01) / (1 / utilization - 1)
    assert sum(each >= true for each in bounds) >= 0.9 * RUNS


def test_a_machine_whose_speed_changes_has_a_bound() -> None:
    generator = np.random.default_rng(5)
    true = np.quantile(np.concatenate([drifting(generator, 1200) for _ in range(500)]), 0.99)
    bounds = np.array([Latency.of(drifting(generator, 1200)).p99_at_most_s for _ in range(RUNS)])
    assert (bounds >= true).mean() >= 0.95
    assert np.median(bounds) < 6 * true


@pytest.mark.parametrize("count", [500, 3000])
def test_bounds_of_independent_requests_hold(count: int) -> None:
    generator = np.random.default_rng(count)
    bounds = [quantile_bounds(generator.exponential(1.0, count)) for _ in range(RUNS)]
    true = -math.log(0.01)
    assert sum(each.upper >= true for each in bounds) >= 0.95 * RUNS
    assert sum(each.lower <= true for each in bounds) >= 0.95 * RUNS


@pytest.mark.parametrize("utilization", [0.3, 0.6, 0.8])
def test_bounds_hold_where_requests_wait_for_each_other(utilization: float) -> None:
    generator = np.random.default_rng(1)
    bounds = [quantile_bounds(queue(generator, utilization, 4000)) for _ in range(RUNS)]
    true = -math.log(0.01) / (1 / utilization - 1)  # the time in M/M/1 is exponential
    assert sum(each.upper >= true for each in bounds) >= 0.95 * RUNS
    assert sum(each.lower <= true for each in bounds) >= 0.95 * RUNS


def test_counting_requests_of_a_queue_as_independent_would_not_hold() -> None:
    """The negative control: what the blocks are for."""
    generator = np.random.default_rng(1)
    shuffled = [quantile_bounds(generator.permutation(queue(generator, 0.8, 4000))) for _ in range(RUNS)]
    true = -math.log(0.01) / (1 / 0.8 - 1)
    assert sum(each.upper >= true for each in shuffled) < 0.9 * RUNS


def test_a_failed_request_is_slower_than_any() -> None:
    latencies = np.full(1000, 0.01)
    latencies[::50] = math.inf
    summary = Latency.of(latencies)
    assert math.isinf(summary.p99.lower)
    assert summary.mean_s == pytest.approx(0.01)
    assert summary.p50_s == 0.01
    assert math.isinf(Latency.of(np.full(5, math.inf)).mean_s)


def test_a_mean_lies_in_its_interval_as_often_as_it_says() -> None:
    generator = np.random.default_rng(3)
    intervals = [mean_interval(generator.normal(10.0, 2.0, BLOCKS)) for _ in range(2000)]
    assert 0.935 <= np.mean([each.lower <= 10 <= each.upper for each in intervals]) <= 0.965
