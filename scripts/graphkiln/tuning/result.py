"""Result of a search: ranked candidates with their limits, the Pareto front, and the knee of the latency curve."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from graphkiln.tuning.candidate import QUEUE_DELAY_US, Candidate
from graphkiln.tuning.contest import CandidateScore, Point
from graphkiln.tuning.drift import Reading
from graphkiln.tuning.space import Exclusion
from graphkiln.tuning.target import Objective, Target
from graphkiln.tuning.trials import Measured, OpenLoop, SessionTiming


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """A measured candidate in the table of results.

    Attributes:
        scored: Points and score; `lost` is the reason why it was not chosen.
        score: Formatted score.
        limit: Description of the bottleneck.
        accuracy_lost: Loss of accuracy on the labelled samples as a share; None if unknown.
    """

    scored: CandidateScore
    score: str
    limit: str
    accuracy_lost: float | None = None

    @property
    def best_point(self) -> Point | None:
        """The highest reached rate, otherwise the load with the lowest p99."""
        points = self.scored.points
        reached = [
            each for each in points if isinstance(each.load, OpenLoop) and _rate(each) <= self.scored.score.lower
        ]
        if reached:
            return max(reached, key=_rate)
        return min(points, key=lambda each: each.measured.latency.p99.value, default=None)


@dataclass(frozen=True, kw_only=True)
class Result:
    """Result of a search.

    Attributes:
        target: Required p99, rate and objective.
        chosen: Chosen configuration; None if none meets the target.
        promise: Load and measurement of the confirmation, without conversion to another machine speed.
        closest: Without a choice, the best unconfirmed candidate that met the target, otherwise the nearest one.
        default: Today's configuration, if it was measured.
        rows: All measured candidates, best first.
        front: Pareto front by throughput, p99, memory and accuracy.
        exclusions: Candidates without a measurement, with reasons.
        curve: Latency of the choice by rate.
        knee: Rate above which latency rises faster than throughput; None if the curve has none.
        readings: Speed of the machine over time.
        notes: Reasons to doubt the results.
        spent_s: Spent seconds of the budget.
        measurements: Number of measurements.
    """

    target: Target
    chosen: Row | None
    promise: Point | None
    closest: Row | None
    default: Row | None
    rows: tuple[Row, ...]
    front: tuple[Row, ...]
    exclusions: tuple[Exclusion, ...]
    curve: tuple[Point, ...]
    knee: float | None
    readings: tuple[Reading, ...]
    notes: tuple[str, ...]
    spent_s: float
    measurements: int

    @property
    def is_unproven(self) -> bool:
        """True if `closest` met the target but was not confirmed."""
        return self.closest is not None and has_reached(self.closest.scored, self.target)

    @property
    def candidate(self) -> Candidate | None:
        """The chosen configuration."""
        return self.chosen.scored.candidate if self.chosen else None


def has_reached(scored: CandidateScore, target: Target) -> bool:
    """Return true if a candidate met the target under some load."""
    lower = scored.score.lower
    return math.isfinite(lower) and (lower > 0 or target.objective is not Objective.THROUGHPUT)


def closest_row(rows: Sequence[Row], target: Target) -> Row | None:
    """Return the row to report without a choice: the best unconfirmed one that met the target, else the lowest p99."""
    if met := [row for row in rows if has_reached(row.scored, target)]:
        return max(met, key=lambda row: row.scored.score.lower)
    p99_s = [(point.measured.latency.p99.value, row) for row in rows if (point := row.best_point)]
    return min(p99_s, key=lambda each: each[0])[1] if p99_s else None


# Share of p99 above which a part is the bottleneck.
_MUCH = 0.5


def limit_of(scored: CandidateScore, timing: SessionTiming, target: Target, cores: int) -> str:
    """Describe the bottleneck of a candidate: errors, the model, the batcher, the cores or the queue."""
    point = _hardest(scored, target)
    if point is None:
        return scored.lost
    measured = point.measured
    if measured.errors:
        kind, count = max(measured.errors.items(), key=lambda each: each[1])
        return f"errors: {count} requests ended with {kind}"
    if isinstance(point.load, OpenLoop) and not measured.keeps_up:
        return f"throughput: {measured.throughput.value:.3g} of {point.load.rate:.3g} requests per second are answered"
    return _slowest_part(scored.candidate, measured, min(timing.batch_s.values()), cores)


def _slowest_part(candidate: Candidate, measured: Measured, run_s: float, cores: int) -> str:
    """Describe the main part of the latency of the slowest requests."""
    p99_s, delay_s = measured.latency.p99.value, max(0, candidate.number(QUEUE_DELAY_US, 0)) * 1e-6
    if run_s > _MUCH * p99_s:
        return f"the model: one sample takes {run_s * 1e3:.3g} of {p99_s * 1e3:.3g} ms"
    if delay_s > _MUCH * p99_s:
        return f"the batcher: it waits up to {delay_s * 1e3:.3g} of {p99_s * 1e3:.3g} ms for more requests"
    if measured.server_cores is not None and measured.server_cores > 0.9 * (cores - measured.client_cores):
        return f"the cores: the server uses {measured.server_cores:.2g} of {cores}"
    if measured.latency.p50_s < p99_s / 3:
        return f"the queue: the median is {measured.latency.p50_s * 1e3:.3g} ms, slower requests wait"
    return f"the model under load: it takes {measured.latency.p50_s * 1e3:.3g} ms, alone {run_s * 1e3:.3g} ms"


def _hardest(scored: CandidateScore, target: Target) -> Point | None:
    """Return the point at the limit: the lowest rate that missed the target, otherwise the last one.

    If all points missed the target, return the closest one.
    """
    points = scored.points
    if points and all(each.measured.latency.p99.value > target.p99_s for each in points):
        return min(points, key=lambda each: each.measured.latency.p99.value)
    missed = [
        each
        for each in points
        if isinstance(each.load, OpenLoop) and each.measured.latency.p99_at_most_s > target.p99_s
    ]
    return min(reversed(missed), key=_rate, default=points[-1] if points else None)


def pareto_front(rows: Sequence[Row], target: Target) -> tuple[Row, ...]:
    """Return the rows that met the target and that no other row dominates."""
    judged = [(row, _respects(row)) for row in rows if row.scored.points and has_reached(row.scored, target)]

    def dominates(one: Sequence[float], other: Sequence[float]) -> bool:
        return all(a >= b for a, b in zip(one, other, strict=True)) and tuple(one) != tuple(other)

    return tuple(row for row, own in judged if not any(dominates(other, own) for _, other in judged))


def _respects(row: Row) -> tuple[float, ...]:
    """Return throughput, and negated p99, memory and lost accuracy."""
    point = row.best_point
    if point is None:
        return (-math.inf,) * 4
    measured = point.measured
    return (
        measured.throughput.value,
        -measured.latency.p99.value,
        -math.inf if measured.memory_bytes is None else -measured.memory_bytes,
        -(row.accuracy_lost or 0.0),
    )


def knee(points: Sequence[Point]) -> float | None:
    """Return the rate at which p99 is farthest below the line between the ends of the curve, or None.

    Source: V. Satopaa and others, "Finding a 'Kneedle' in a Haystack" (2011), without smoothing.
    """
    curve = [(_rate(each), each.measured.latency.p99.value) for each in sorted(points, key=_rate)]
    curve = [(rate, p99_s) for rate, p99_s in curve if math.isfinite(p99_s)]
    if len(curve) < 3 or curve[-1][1] <= curve[0][1]:
        return None
    (first, low), (last, high) = curve[0], curve[-1]
    below = {rate: (rate - first) / (last - first) - (p99_s - low) / (high - low) for rate, p99_s in curve}
    rate = max(below, key=lambda each: below[each])
    return rate if below[rate] > 0.05 else None


def _rate(point: Point) -> float:
    return point.load.rate if isinstance(point.load, OpenLoop) else 0.0
