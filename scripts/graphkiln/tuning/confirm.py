"""The last measurement of a choice: other arrivals, longer, and the machine as it is. Its bound is the promise."""

from __future__ import annotations

import statistics

from graphkiln.tuning.candidate import Candidate
from graphkiln.tuning.contest import CandidateScore, Point
from graphkiln.tuning.journal import Budget, RecordedTrials
from graphkiln.tuning.statistics import requests_needed
from graphkiln.tuning.target import Objective, Target
from graphkiln.tuning.trials import ClosedLoop, Failed, LoadShape, Measured, OpenLoop

_SEED = 77_000_000
# Measurements at most, and into how many the budget that is left is divided.
_TRIES, _SLICES = 8, 5
# Factors on a rate: before the last measurement that fits, after one whose p99 missed the target, and after one
# whose bound alone missed it.
_LARGE_STEP, _STEP, _SMALL_STEP = 0.75, 0.9, 0.93
# Requests that may exceed the bound: so many make it tight; with fewer than the few a bound is seldom found, however
# far below the target p99 is.
_SLOWER, _FEW_SLOWER = 100, 5
# The same where several requests say as much as an independent one, counted in those; and how many requests of a
# measurement tell how many these are.
_CERTAIN, _COUNTED = 1, 100
_SHORTEST_S = 5.0
# Duration of the second measurement of a load that did not hold, as a multiple of the first.
_LONGER = 2
# Shares of the promised rate at which latency is measured, beside the rate itself.
_CURVE = (0.25, 0.5, 0.7, 0.85, 1.1)


def confirm(trials: RecordedTrials, scored: CandidateScore, target: Target, level: float) -> tuple[Point | None, str]:
    """Measure a candidate under the load that is to be promised; lower a free rate until it holds.

    Args:
        trials: Measures within its budget; one measurement is made in any case.
        scored: Score of the candidate from the search.
        target: p99 and, if given, the rate.
        level: Speed of the machine now, as a share of that of the score.

    Returns:
        The load that held with its measurement, and how the same load did not hold before, if so; or None and the
        reason.
    """
    is_free = target.objective is Objective.THROUGHPUT
    rate = scored.score.lower * min(level, 1.0) if is_free else target.rate
    budget, candidate = trials.budget, scored.candidate
    reason, slice_s = "its figures were not measured again", (budget.left_s - budget.start_s) / _SLICES
    inflation, doubt = _inflation_of(scored, target.p99_s), ""
    for number in range(_TRIES):
        if number and budget.left_s < budget.needed_s(candidate, _SHORTEST_S):
            return None, f"{reason}, and the budget is spent"
        if rate and is_free and not _fits_twice(budget, candidate, _enough_s(slice_s, rate, inflation)):
            rate *= _LARGE_STEP  # the last one that fits: rather a lower promise than none
        load: LoadShape = OpenLoop(float(f"{rate:.4g}")) if rate else ClosedLoop(1)
        per_s = _requests_per_s(load, scored)
        seconds = _seconds(budget, candidate, per_s, _enough_s(slice_s, per_s, inflation) * (_LONGER if doubt else 1))
        outcome = trials.measure(candidate, load, round(seconds, 3), _SEED + number)
        if isinstance(outcome, Failed):
            return None, outcome.reason
        p99 = outcome.latency.p99
        if outcome.latency.p99_at_most_s <= target.p99_s and outcome.keeps_up:
            return Point(load=load, measured=outcome), doubt
        reason = _missed(outcome, target.p99_s)
        if p99.value <= target.p99_s:
            inflation = outcome.latency.inflation  # that of a growing queue means nothing
        if rate and is_free:
            rate *= _STEP if p99.value > target.p99_s else _SMALL_STEP
        elif p99.value > target.p99_s or not outcome.keeps_up:
            if doubt:
                break
            doubt = reason  # once, it may have been the machine that stood still
    return None, reason


def sweep(
    trials: RecordedTrials, candidate: Candidate, promise: Point, seconds: float
) -> tuple[tuple[Point, ...], str]:
    """Measure latency around the promised rate, at as many rates as the budget allows.

    Returns:
        The points by rate, and how the candidate failed at another one; "" if it did not.
    """
    if not isinstance(promise.load, OpenLoop):
        return (), ""
    points, failure = {promise.load.rate: promise}, ""
    for share in _CURVE:
        if trials.budget.left_s < 1.5 * trials.budget.needed_s(candidate, seconds):
            break
        load = OpenLoop(float(f"{promise.load.rate * share:.4g}"))
        outcome = trials.measure(candidate, load, seconds, _SEED - 1)
        if isinstance(outcome, Failed):
            failure = f"beside the promise, at {load.rate:g} requests per second, it failed: {outcome.reason}"
            break
        points[load.rate] = Point(load=load, measured=outcome)
    return tuple(points[rate] for rate in sorted(points)), failure


def _missed(measured: Measured, p99_s: float) -> str:
    """Explain why a measurement is no proof: too slow, too short for the bound, or a growing queue."""
    latency = measured.latency
    p99_ms = latency.p99.value * 1e3
    if latency.p99.value > p99_s:
        return f"its p99 did not hold when it was measured again: {p99_ms:.3g} ms"
    if not measured.keeps_up:
        reached = f"{measured.throughput.value:.3g} of {measured.due_per_s:.3g}"
        return f"measured again, {reached} requests per second were answered: their queue grows"
    return f"measured again, its p99 was {p99_ms:.3g} ms in {latency.count} requests: too few to be sure of the target"


def _inflation_of(scored: CandidateScore, p99_s: float) -> float:
    """Number of requests that carry the information of one, in points that met the target; 1 if unknown."""
    latencies = [point.measured.latency for point in scored.points if isinstance(point.load, OpenLoop)]
    within = [each for each in latencies if each.p99.value <= p99_s and each.count >= _COUNTED]
    return statistics.median(each.inflation for each in within) if within else 1.0


def _enough_s(slice_s: float, requests_per_s: float, inflation: float) -> float:
    """Duration of a slice of the budget, or longer if a bound takes more requests."""
    requests = max(requests_needed(_FEW_SLOWER), inflation * requests_needed(_CERTAIN))
    return max(slice_s, requests / requests_per_s)


def _fits_twice(budget: Budget, candidate: Candidate, seconds: float) -> bool:
    return budget.left_s >= 2 * budget.needed_s(candidate, seconds)


def _seconds(budget: Budget, candidate: Candidate, requests_per_s: float, enough_s: float) -> float:
    """Duration of a measurement: no longer than a tight bound takes, or than the budget allows."""
    fits_s = budget.left_s - budget.needed_s(candidate, 0.0)
    return max(_SHORTEST_S, min(requests_needed(_SLOWER) / requests_per_s, enough_s, fits_s))


def _requests_per_s(load: LoadShape, scored: CandidateScore) -> float:
    if isinstance(load, OpenLoop):
        return load.rate
    reached = scored.points[-1].measured.throughput.value if scored.points else 1.0
    return max(reached, 1e-3)
