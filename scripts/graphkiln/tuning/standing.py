"""Where a candidate stands in a contest: what it reached, what is ruled out, and why it lost."""

from __future__ import annotations

import math
from collections.abc import Callable
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
