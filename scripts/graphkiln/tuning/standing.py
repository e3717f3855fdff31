"""Where a candidate stands in a contest: what it reached, what is ruled out, and why it lost."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Protocol

from graphkiln.tuning.candidate import Candidate
from graphkiln.tuning.statistics import Interval
from graphkiln.tuning.trials import LoadShape, Measured


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

    def describe(self, score: float) -> str:
        """A score in words, with its unit."""
        ...
