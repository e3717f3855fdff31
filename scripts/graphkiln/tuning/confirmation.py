"""The last measurement of what was chosen: other arrivals, longer, and the machine as it is."""

from __future__ import annotations

from graphkiln.tuning.candidate import Candidate
from graphkiln.tuning.standing import Point, Standing
from graphkiln.tuning.statistics import requests_needed
from graphkiln.tuning.target import Objective, Target
from graphkiln.tuning.trials import ClosedLoop, Failed, LoadShape, OpenLoop, Trials

_SEED = 77_000_000
_TRIES, _SLICES = 8, 5
"""Measurements at most, and into how many the budget that is left is divided."""
_LARGE_STEP, _STEP, _SMALL_STEP = 0.75, 0.9, 0.93
"""What a rate is multiplied with that did not hold: when the budget is spent, when its p99 is beyond the target, and
when only the bound is."""
_SLOWER = 100
"""Requests that may exceed the bound: as many make it tight, and leave enough where they wait for each other."""
_SHORTEST_S = 5.0
_CURVE = (0.25, 0.5, 0.7, 0.85, 1.1)
"""Shares of the promised rate at which latency is measured, beside the rate itself."""


def confirm(
    trials: Trials, standing: Standing, target: Target, level: float, left_s: float
) -> tuple[Point | None, str]:
    """Measures a candidate under the load that is to be promised; where the rate is free, a little less if need be.

    Args:
        trials: What measures.
        standing: Of the candidate.
        target: What must be met.
        level: Speed of the machine now, as a share of that of the scores.
        left_s: Of the budget; at least two measurements are made, whatever it says.

    Returns:
        The load that held with what was measured, and nothing; or None and the reason.
    """
    rate = standing.score.lower * min(level, 1.0) if target.objective is Objective.THROUGHPUT else target.rate
    reason, slice_s = "its figures were not measured again", left_s / _SLICES
    for number in range(_TRIES):
        load: LoadShape = OpenLoop(float(f"{rate:.4g}")) if rate else ClosedLoop(1)
        wanted_s = requests_needed(_SLOWER) / _requests_per_s(load, standing)
        seconds = max(_SHORTEST_S, min(wanted_s, slice_s))
        outcome = trials.measure(standing.candidate, load, round(seconds, 3), _SEED + number)
        if isinstance(outcome, Failed):
            return None, outcome.reason
        p99 = outcome.latency.p99
        if outcome.latency.p99_at_most_s <= target.p99_s:
            return Point(load=load, measured=outcome), ""
        left_s -= seconds
        reason = f"its p99 did not hold when it was measured again: {p99.value * 1e3:.3g} ms"
        if rate and target.objective is Objective.THROUGHPUT:
            rate *= _LARGE_STEP if left_s < 0 else _STEP if p99.value > target.p99_s else _SMALL_STEP
        elif number and (p99.lower > target.p99_s or left_s < 0):
            break
    return None, reason


def sweep(trials: Trials, candidate: Candidate, promise: Point, seconds: float, left_s: float) -> tuple[Point, ...]:
    """Latency against rate, around the rate that was promised; as many points as the time allows."""
    if not isinstance(promise.load, OpenLoop):
        return ()
    points = [promise]
    for share in _CURVE:
        if left_s < seconds:
            break
        load = OpenLoop(float(f"{promise.load.rate * share:.4g}"))
        outcome = trials.measure(candidate, load, seconds, _SEED - 1)
        left_s -= 2 * seconds
        if not isinstance(outcome, Failed):
            points.append(Point(load=load, measured=outcome))
    return tuple(sorted(points, key=lambda each: each.load.rate if isinstance(each.load, OpenLoop) else 0.0))


def _requests_per_s(load: LoadShape, standing: Standing) -> float:
    if isinstance(load, OpenLoop):
        return load.rate
    reached = standing.points[-1].measured.throughput.value if standing.points else 1.0
    return max(reached, 1e-3)
