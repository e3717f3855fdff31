"""The last measurement of what was chosen: other arrivals, longer, and the machine as it is."""

from __future__ import annotations

import statistics

from graphkiln.tuning.budget import Budget
from graphkiln.tuning.candidate import Candidate
from graphkiln.tuning.recording import RecordedTrials
from graphkiln.tuning.standing import Point, Standing
from graphkiln.tuning.statistics import requests_needed
from graphkiln.tuning.target import Objective, Target
from graphkiln.tuning.trials import ClosedLoop, Failed, LoadShape, Measured, OpenLoop

_SEED = 77_000_000
_TRIES, _SLICES = 8, 5
"""Measurements at most, and into how many the budget that is left is divided."""
_LARGE_STEP, _STEP, _SMALL_STEP = 0.75, 0.9, 0.93
"""What a rate is multiplied with before the last measurement that fits, and what one that did not hold: when its p99 is
beyond the target, and when only the bound is."""
_SLOWER, _FEW_SLOWER = 100, 5
"""Requests that may exceed the bound: as many make it tight, and leave enough where they wait for each other; with
fewer than the few a bound is seldom found, however far below the target p99 is."""
_CERTAIN, _COUNTED = 1, 100
"""The same where several requests say as much as an independent one, counted in those; and how many requests of a
measurement tell how many these are."""
_SHORTEST_S = 5.0
_LONGER = 2
"""Times as long as the first one is the second measurement of a load that did not hold."""
_CURVE = (0.25, 0.5, 0.7, 0.85, 1.1)
"""Shares of the promised rate at which latency is measured, beside the rate itself."""


def confirm(trials: RecordedTrials, standing: Standing, target: Target, level: float) -> tuple[Point | None, str]:
    """Measures a candidate under the load that is to be promised; where the rate is free, a little less if need be.

    Args:
        trials: What measures, within its budget; one measurement is made whatever that says.
        standing: Of the candidate.
        target: What must be met.
        level: Speed of the machine now, as a share of that of the scores.

    Returns:
        The load that held with what was measured, and how the same load did not hold before, if so; or None and the
        reason.
    """
    is_free = target.objective is Objective.THROUGHPUT
    rate = standing.score.lower * min(level, 1.0) if is_free else target.rate
    budget, candidate = trials.budget, standing.candidate
    reason, slice_s = "its figures were not measured again", (budget.left_s - budget.start_s) / _SLICES
    inflation, doubt = _inflation_of(standing, target.p99_s), ""
    for number in range(_TRIES):
        if number and budget.left_s < budget.needed_s(candidate, _SHORTEST_S):
            return None, f"{reason}, and the budget is spent"
        if rate and is_free and not _fits_twice(budget, candidate, _enough_s(slice_s, rate, inflation)):
            rate *= _LARGE_STEP  # the last one that fits: rather a lower promise than none
        load: LoadShape = OpenLoop(float(f"{rate:.4g}")) if rate else ClosedLoop(1)
        per_s = _requests_per_s(load, standing)
        seconds = _seconds(budget, candidate, per_s, _enough_s(slice_s, per_s, inflation) * (_LONGER if doubt else 1))
        outcome = trials.measure(candidate, load, round(seconds, 3), _SEED + number)
        if isinstance(outcome, Failed):
            return None, outcome.reason
        p99 = outcome.latency.p99
        if outcome.latency.p99_at_most_s <= target.p99_s and outcome.keeps_up:
            return Point(load=load, measured=outcome), doubt
        reason = _missed(outcome, target.p99_s)
        if p99.value <= target.p99_s:
            inflation = outcome.latency.inflation  # of a queue that grows it says nothing
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
    """Latency against rate, around the rate that was promised; as many points as the time allows.

    Returns:
        The points by rate, and how the candidate failed at another one; empty where it did not.
    """
    if not isinstance(promise.load, OpenLoop):
        return (), ""
    points, failure = [promise], ""
    for share in _CURVE:
        if trials.budget.left_s < 1.5 * trials.budget.needed_s(candidate, seconds):
            break
        load = OpenLoop(float(f"{promise.load.rate * share:.4g}"))
        outcome = trials.measure(candidate, load, seconds, _SEED - 1)
        if isinstance(outcome, Failed):
            failure = f"beside the promise, at {load.rate:g} requests per second, it failed: {outcome.reason}"
            break
        points.append(Point(load=load, measured=outcome))
    return tuple(sorted(points, key=lambda each: each.load.rate if isinstance(each.load, OpenLoop) else 0.0)), failure


def _missed(measured: Measured, p99_s: float) -> str:
    """Why a measurement proves nothing: it is too slow, or too short to say that it is not, or its queue grows."""
    latency = measured.latency
    p99_ms = latency.p99.value * 1e3
    if latency.p99.value > p99_s:
        return f"its p99 did not hold when it was measured again: {p99_ms:.3g} ms"
    if not measured.keeps_up:
        reached = f"{measured.throughput.value:.3g} of {measured.due_per_s:.3g}"
        return f"measured again, {reached} requests per second were answered: their queue grows"
    return f"measured again, its p99 was {p99_ms:.3g} ms in {latency.count} requests: too few to be sure of the target"


def _inflation_of(standing: Standing, p99_s: float) -> float:
    """How many requests say as much as an independent one, where the search met the target; 1 where it is unknown."""
    latencies = [point.measured.latency for point in standing.points if isinstance(point.load, OpenLoop)]
    within = [each for each in latencies if each.p99.value <= p99_s and each.count >= _COUNTED]
    return statistics.median(each.inflation for each in within) if within else 1.0


def _enough_s(slice_s: float, requests_per_s: float, inflation: float) -> float:
    """A slice of the budget, or longer where a bound takes more requests than that gives."""
    requests = max(requests_needed(_FEW_SLOWER), inflation * requests_needed(_CERTAIN))
    return max(slice_s, requests / requests_per_s)


def _fits_twice(budget: Budget, candidate: Candidate, seconds: float) -> bool:
    return budget.left_s >= 2 * budget.needed_s(candidate, seconds)


def _seconds(budget: Budget, candidate: Candidate, requests_per_s: float, enough_s: float) -> float:
    """How long to measure: no longer than a tight bound takes, or than the budget allows."""
    fits_s = budget.left_s - budget.needed_s(candidate, 0.0)
    return max(_SHORTEST_S, min(_seconds_for(_SLOWER, requests_per_s), enough_s, fits_s))


def _seconds_for(slower: int, requests_per_s: float) -> float:
    return requests_needed(slower) / requests_per_s


def _requests_per_s(load: LoadShape, standing: Standing) -> float:
    if isinstance(load, OpenLoop):
        return load.rate
    reached = standing.points[-1].measured.throughput.value if standing.points else 1.0
    return max(reached, 1e-3)
