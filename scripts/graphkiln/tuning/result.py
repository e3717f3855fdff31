"""What a search found, and why."""

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

# Where a candidate stands in a contest: what it reached, what is ruled out, and why it lost.


@dataclass(frozen=True, kw_only=True, slots=True)
class Point:
    """A load, and what it did."""

    load: LoadShape
    measured: Measured


@dataclass(frozen=True, kw_only=True, slots=True)
class Standing:
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

    def out(self, reason: str) -> Standing:
        """The standing of a candidate that lost."""
        return replace(self, lost=reason)


@dataclass(frozen=True, kw_only=True, slots=True)
class Race:
    """How those that came close to the best are measured against each other.

    Attributes:
        load: What all of them get.
        seconds: Of each measurement.
        cost: What counts of one: less is better, above 0; infinite where it is worth nothing.
        what: The same in words.
        is_near: Whether a standing takes part.
        reached: The score of whoever wins.
        sure: Number of rounds -> standard errors between two that are told apart.
        fewest: Rounds before anybody is told apart.
        spread: The least standard deviation of the logarithm of what counts that is believed.
        defends: Whether what serves today takes part, however far behind it seems to be, and stays where nothing is
            surely better.
    """

    load: LoadShape
    seconds: float
    cost: Callable[[Measured], float]
    what: str
    is_near: Callable[[Standing], bool]
    reached: Callable[[Standing], Interval]
    sure: Callable[[int], float]
    fewest: int
    spread: float
    defends: bool = False


class Contest(Protocol):
    """What candidates are compared by, and how it is measured."""

    def enter(self, candidate: Candidate, rate_bound: float) -> Standing:
        """The standing before the first measurement; the bound is what a bare session sets."""
        ...

    def advance(self, standing: Standing, seconds: float, reached: float) -> Standing:
        """Makes one measurement of about so many seconds; `reached` is the best score of another."""
        ...

    def settle(self, standing: Standing, reached: float) -> Standing:
        """Measures until the score is as exact as it gets, or surely below what another reached."""
        ...

    def is_tie(self, standing: Standing, best: Standing) -> bool:
        """Whether the measurements do not allow to say which of two that both meet the target is better."""
        ...

    def race(self, best: Standing) -> Race | None:
        """How near-ties of the best are told apart; None where measuring them again says nothing new."""
        ...

    def describe(self, score: float) -> str:
        """A score in words, with its unit."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """A candidate in the table of results.

    Attributes:
        standing: Its points and its score; `lost` says why it was not chosen.
        score: In words.
        limit: What keeps it from doing better, in words.
        accuracy_lost: Share of the labelled samples' accuracy that it loses; None where unknown.
    """

    standing: Standing
    score: str
    limit: str
    accuracy_lost: float | None = None

    @property
    def best_point(self) -> Point | None:
        """The point that counts: of rates that were reached, the highest, or else the load with the lowest p99."""
        points = self.standing.points
        reached = [
            each for each in points if isinstance(each.load, OpenLoop) and _rate(each) <= self.standing.score.lower
        ]
        if reached:
            return max(reached, key=_rate)
        return min(points, key=lambda each: each.measured.latency.p99.value, default=None)


@dataclass(frozen=True, kw_only=True)
class Result:
    """What a search found.

    Attributes:
        target: What was searched for.
        chosen: The configuration; None where none meets the target.
        promise: The load under which it was measured once more, without any correction, and what it did.
        closest: Where none was proven: the best that met the target all the same, or else the one that comes closest;
            its `limit` says what keeps it from more.
        default: The default configuration, where it was measured.
        rows: Every candidate that was measured, the best first.
        front: Of these, the ones that no other beats in throughput, p99, memory and accuracy together.
        exclusions: What was not measured, with the reasons.
        curve: Latency against rate of what was chosen, by rate.
        knee: Rate beyond which latency rises faster than throughput; None where the curve has none.
        readings: Speed of the machine meanwhile.
        notes: What makes results doubtful.
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
        """Whether what comes closest met the target, and was not proven to."""
        return self.closest is not None and _has_reached(self.closest)

    @property
    def candidate(self) -> Candidate | None:
        """The configuration that was chosen."""
        return self.chosen.standing.candidate if self.chosen else None


def pareto_front(rows: Sequence[Row]) -> tuple[Row, ...]:
    """The rows that no other row beats in one respect without losing in another.

    Rows that reached nothing are left out.
    """
    judged = [(row, _respects(row)) for row in rows if row.standing.points and _has_reached(row)]
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
    """Throughput, and what is to be small with its sign turned."""
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
    lower = row.standing.score.lower
    return math.isfinite(lower) and lower != 0


def _rate(point: Point) -> float:
    return point.load.rate if isinstance(point.load, OpenLoop) else 0.0
