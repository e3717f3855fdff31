"""Result of a search: candidates with their scores, the table, the Pareto front, the knee."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from graphkiln.tuning.candidate import Candidate
from graphkiln.tuning.drift import Reading
from graphkiln.tuning.space import Exclusion
from graphkiln.tuning.statistics import Interval
from graphkiln.tuning.target import Target
from graphkiln.tuning.trials import LoadShape, Measured, OpenLoop

# Score of a candidate in a contest: bounds on what it reaches, and why it lost.


@dataclass(frozen=True, kw_only=True, slots=True)
class Point:
    """A load and its measurement."""

    load: LoadShape
    measured: Measured


@dataclass(frozen=True, kw_only=True, slots=True)
class CandidateScore:
    """A candidate in a contest.

    Attributes:
        candidate: Which.
        score: More is better. `lower` was reached; 0 for a rate, or minus infinity, where the target was not met.
            `upper` is not ruled out yet.
        rate_bound: Requests per second that its bare sessions cannot beat.
        points: What was measured, in order.
        lost: Why it is out of the contest; empty while it is in.
    """

    candidate: Candidate
    score: Interval
    rate_bound: float = math.inf
    points: tuple[Point, ...] = ()
    lost: str = ""

    def out(self, reason: str) -> CandidateScore:
        """Return this score marked as lost."""
        return replace(self, lost=reason)


@dataclass(frozen=True, kw_only=True, slots=True)
class Race:
    """Rules for measuring near-ties against each other.

    Attributes:
        load: What all of them get.
        seconds: Of each measurement.
        cost: Cost of a measurement, above 0, less is better; infinite for a useless one.
        what: Name of the cost.
        is_near: Selects the candidates that take part.
        reached: Score that a winner gets.
        sure: Number of rounds -> standard errors that make a significant difference.
        fewest: Least number of rounds before a candidate is dropped.
        spread: Least standard deviation of the cost's logarithm that is assumed.
        defends: Today's configuration takes part, however far behind it seems to be, and stays unless another is
            significantly better.
    """

    load: LoadShape
    seconds: float
    cost: Callable[[Measured], float]
    what: str
    is_near: Callable[[CandidateScore], bool]
    reached: Callable[[CandidateScore], Interval]
    sure: Callable[[int], float]
    fewest: int
    spread: float
    defends: bool = False


class Contest(Protocol):
    """Comparison of candidates by one objective."""

    def enter(self, candidate: Candidate, rate_bound: float) -> CandidateScore:
        """Return the score before the first measurement; the bound comes from the bare session."""
        ...

    def advance(self, scored: CandidateScore, seconds: float, reached: float) -> CandidateScore:
        """Make one measurement of about `seconds`; `reached` is the best score of another candidate."""
        ...

    def settle(self, scored: CandidateScore, reached: float) -> CandidateScore:
        """Measure until the score is as exact as it gets, or significantly below `reached`."""
        ...

    def is_tie(self, scored: CandidateScore, best: CandidateScore) -> bool:
        """Return true if the measurements of two that meet the target do not differ significantly."""
        ...

    def race(self, best: CandidateScore) -> Race | None:
        """Rules for racing near-ties of the best; None if measuring them again gives no new information."""
        ...

    def describe(self, score: float) -> str:
        """Format a score with its unit."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """A candidate in the table of results.

    Attributes:
        scored: Its points and its score; `lost` says why it was not chosen.
        score: In words.
        limit: What keeps it from doing better, in words.
        accuracy_lost: Share of the labelled samples' accuracy that it loses; None where unknown.
    """

    scored: CandidateScore
    score: str
    limit: str
    accuracy_lost: float | None = None

    @property
    def best_point(self) -> Point | None:
        """The point that counts: of rates that were reached, the highest, or else the load with the lowest p99."""
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
        target: What was searched for.
        chosen: The configuration; None where none meets the target.
        promise: The load under which it was measured once more, without any correction, and what it did.
        closest: Where none was proven: the best that met the target all the same, or else the one that comes closest;
            its `limit` explains what keeps it from more.
        default: The default configuration, where it was measured.
        rows: Every candidate that was measured, the best first.
        front: Of these, the ones that no other beats in throughput, p99, memory and accuracy together.
        exclusions: What was not measured, with the reasons.
        curve: Latency against rate of what was chosen, by rate.
        knee: Rate beyond which latency rises faster than throughput; None where the curve has none.
        readings: Speed of the machine meanwhile.
        notes: Reasons to doubt the results.
        spent_s: Of the budget.
        measurements: How many it took.
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
        """Return true if `closest` met the target and was not confirmed."""
        return self.closest is not None and _has_reached(self.closest)

    @property
    def candidate(self) -> Candidate | None:
        """The configuration that was chosen."""
        return self.chosen.scored.candidate if self.chosen else None


def pareto_front(rows: Sequence[Row]) -> tuple[Row, ...]:
    """The rows that no other row beats in one respect without losing in another.

    Rows that reached nothing are left out.
    """
    judged = [(row, _respects(row)) for row in rows if row.scored.points and _has_reached(row)]
    return tuple(row for row, own in judged if not any(_dominates(other, own) for _, other in judged))


def knee(points: Sequence[Point]) -> float | None:
    """The rate of a curve at which its p99 is farthest below the line between its ends; None where it never is.

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


def _respects(row: Row) -> tuple[float, ...]:
    """Throughput, and with the sign turned p99, memory and lost accuracy."""
    point = row.best_point
    if point is None:
        return (-math.inf,) * 4
    measured = point.measured
    unknown = math.inf  # what is unknown of one is unknown of all
    return (
        measured.throughput.value,
        -measured.latency.p99.value,
        -(unknown if measured.memory_bytes is None else measured.memory_bytes),
        -(row.accuracy_lost or 0.0),
    )


def _dominates(one: Sequence[float], other: Sequence[float]) -> bool:
    return all(a >= b for a, b in zip(one, other, strict=True)) and tuple(one) != tuple(other)


def _has_reached(row: Row) -> bool:
    lower = row.scored.score.lower
    return math.isfinite(lower) and lower != 0


def _rate(point: Point) -> float:
    return point.load.rate if isinstance(point.load, OpenLoop) else 0.0
