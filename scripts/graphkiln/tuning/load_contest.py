"""The contest under a load that is given: the lowest latency, memory or cost of those that meet the p99."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial

from graphkiln.tuning.candidate import Candidate
from graphkiln.tuning.drift import Reference
from graphkiln.tuning.standing import Point, Race, Standing
from graphkiln.tuning.statistics import Interval, requests_needed
from graphkiln.tuning.target import Objective, Target
from graphkiln.tuning.trials import ClosedLoop, Failed, LoadShape, Measured, OpenLoop

_MEMORY_NOISE, _COST_NOISE = 0.02, 0.05
"""Shares by which two measurements of the same differ: what is nearer than that is equal."""
_ALIKE = {Objective.LATENCY: 0.1}
"""Shares by which p99 of the same differs from one start of a server to the next, however exact each one is."""
_NEAR = 1.25
"""Times as much as the best needs what may be as good in another hour."""
_LEAST_SPREAD = 0.05
"""Of the logarithm of what counts, however alike a few rounds are: two starts of a server differ by as much."""
_STUDENT_T = {3: 2.92, 4: 2.35, 5: 2.13}
"""One-sided 95% quantile of Student's t by the number of rounds: what serves today leaves for what is surely better."""
_RACED = {Objective.LATENCY: "p99 under the same load", Objective.COST: "CPU time of a request"}
"""What measurements of the same differ in; memory is what it is."""
_UNKNOWN = {Objective.MEMORY: "memory", Objective.COST: "CPU time"}
_DOUBLINGS = 4
_FEWEST = 60
"""Requests of a first look."""
_LONGER = 4
"""So many times as long, or as long as a bound takes, is measured again what the machine may have disturbed."""


class LoadContest:
    """Implements `Contest`; a score is what the objective asks to be small, with its sign turned.

    Args:
        reference: Measures.
        target: With a rate, or else one caller is served.
        shortest_s: Of one measurement.
        longest_s: Of one measurement.
    """

    def __init__(self, reference: Reference, target: Target, shortest_s: float, longest_s: float) -> None:
        self._reference, self._target = reference, target
        self._shortest_s, self._longest_s = shortest_s, longest_s
        self.load: LoadShape = OpenLoop(target.rate) if target.rate else ClosedLoop(1)

    def enter(self, candidate: Candidate, rate_bound: float) -> Standing:
        """See `Contest`."""
        return Standing(candidate=candidate, score=Interval(0.0, -math.inf, math.inf), rate_bound=rate_bound)

    def advance(self, standing: Standing, seconds: float, reached: float) -> Standing:
        """See `Contest`."""
        del reached  # the load is the same for all: nothing is gained by knowing the best
        enough_s = _FEWEST / self._target.rate if self._target.rate else 0.0
        return self._measured(standing, min(max(seconds, enough_s), self._longest_s))

    def settle(self, standing: Standing, reached: float) -> Standing:
        """See `Contest`: twice as long each time, until the bounds on p99 say on which side of the target it lies."""
        del reached
        seconds = self._needed_s(standing)
        enough_s, longest_s = seconds, max(self._longest_s, 4 * seconds)  # a low rate takes its time
        for _ in range(_DOUBLINGS):
            if standing.lost or (standing.points and self._is_settled(standing, enough_s)):
                break
            if not self._reference.affords(standing.candidate, min(seconds, longest_s)):
                break
            standing = self._measured(standing, min(seconds, longest_s))
            if seconds >= longest_s:
                break
            seconds *= 2
        return self._judge_widely(standing)

    def is_tie(self, standing: Standing, best: Standing) -> bool:
        """See `Contest`."""
        score, alike = standing.score, _ALIKE.get(self._target.objective, 0.0)
        is_near = score.value >= best.score.value * (1 + alike)
        return math.isfinite(score.lower) and (is_near or not best.score.is_above(score))

    def race(self, best: Standing) -> Race | None:
        """See `Contest`: under the load that is given, by what is asked to be small."""
        what = _RACED.get(self._target.objective)
        if what is None:
            return None
        return Race(
            load=self.load,
            seconds=min(self._needed_s(best), self._longest_s),
            cost=self._cost,
            what=what,
            is_near=partial(self._is_near, best=best),
            reached=lambda each: each.score,
            sure=lambda rounds: _STUDENT_T[min(rounds, max(_STUDENT_T))],
            fewest=min(_STUDENT_T),
            spread=_LEAST_SPREAD,
            defends=True,
        )

    def _cost(self, measured: Measured) -> float:
        return max(-self._score(measured).value, 1e-9)

    def _is_near(self, standing: Standing, best: Standing) -> bool:
        has_met = not standing.lost and math.isfinite(standing.score.lower)
        return has_met and (self.is_tie(standing, best) or standing.score.value >= _NEAR * best.score.value)

    def describe(self, score: float) -> str:
        """See `Contest`."""
        if not math.isfinite(score):
            return "nothing that meets the target"
        unit = {
            Objective.MEMORY: f"{-score / 2**20:.0f} MiB",
            Objective.COST: f"{-score * 1e3:.3g} CPU ms a request",
        }
        return unit.get(self._target.objective, f"p99 {-score * 1e3:.3g} ms")

    def _measured(self, standing: Standing, seconds: float) -> Standing:
        """Measures; once more where it may have been the machine that stood still for a moment, not the candidate.

        The second time lasts so long that a single stall is no hundredth of it, and what stands still again and again
        shows that. It begins with the same arrivals: a load that comes all at once comes so again.
        """
        asked = self._measured_once(standing, seconds)
        again_s = min(max(_LONGER * seconds, self._needed_s(asked)), max(self._longest_s, seconds))
        may_ask = asked.points != standing.points and self._is_strange(asked.points[-1].measured)
        if not may_ask or again_s < 2 * seconds or not self._reference.affords(standing.candidate, again_s):
            return asked
        return self._measured_once(replace(asked, lost=""), again_s)

    def _is_strange(self, measured: Measured) -> bool:
        """Whether the target was surely missed, while most requests were quick and none are left over."""
        is_quick = measured.latency.p50_s <= self._target.p99_s / 2
        return is_quick and measured.keeps_up and measured.latency.p99.lower > self._target.p99_s

    def _measured_once(self, standing: Standing, seconds: float) -> Standing:
        outcome = self._reference.measure(standing.candidate, self.load, seconds)
        if isinstance(outcome, Failed):
            return standing.out(outcome.reason)
        standing = replace(standing, points=(*standing.points, Point(load=self.load, measured=outcome)))
        score = self._score(outcome)
        if not math.isfinite(score.value) and self._target.objective is not Objective.LATENCY:
            return standing.out(f"its {_UNKNOWN[self._target.objective]} cannot be read here")
        if reason := self._missed(outcome):
            return replace(standing, score=Interval(score.value, -math.inf, score.upper)).out(reason)
        meets = outcome.latency.p99.upper <= self._target.p99_s
        return replace(standing, score=score if meets else Interval(score.value, -math.inf, score.upper))

    def _judge_widely(self, standing: Standing) -> Standing:
        """By the wide bound where the other says nothing after all: the speed of the machine changes."""
        if standing.lost or not standing.points or math.isfinite(standing.score.lower):
            return standing
        latency, score = standing.points[-1].measured.latency, standing.score
        if latency.p99_at_most_s > self._target.p99_s:
            return standing
        if self._target.objective is Objective.LATENCY:
            return replace(standing, score=Interval(score.value, -latency.p99_at_most_s, score.upper))
        return replace(standing, score=self._score(standing.points[-1].measured))

    def _missed(self, measured: Measured) -> str:
        """Why the target is surely missed; empty where it may be met."""
        p99 = measured.latency.p99
        if self._target.rate and not measured.keeps_up:
            return f"answers {measured.throughput.value:.3g} of {measured.due_per_s:.3g} requests per second"
        if p99.lower > self._target.p99_s:
            return f"p99 of {p99.value * 1e3:.3g} ms, at least {p99.lower * 1e3:.3g} ms"
        return ""

    def _score(self, measured: Measured) -> Interval:
        if self._target.objective is Objective.MEMORY:
            return _negated(measured.memory_bytes, _MEMORY_NOISE)
        if self._target.objective is Objective.COST:
            used = measured.server_cores
            return _negated(None if used is None else used / max(measured.throughput.value, 1e-9), _COST_NOISE)
        p99 = measured.latency.p99
        return Interval(-p99.value, -p99.upper, -p99.lower)

    def _needed_s(self, standing: Standing) -> float:
        """Seconds for a bound that five requests may exceed, at the rate that is given or was reached."""
        reached = standing.points[-1].measured.throughput.value if standing.points else 1 / self._target.p99_s
        return max(self._shortest_s, requests_needed(5) / (self._target.rate or max(reached, 1e-3)))

    def _is_settled(self, standing: Standing, seconds: float) -> bool:
        """Whether it was measured that long and meets the target."""
        last = standing.points[-1].measured
        return math.isfinite(standing.score.lower) and last.seconds >= seconds * 0.99


def _negated(value: float | None, noise: float) -> Interval:
    """A score for a value that is to be small; nothing where the value is unknown."""
    if value is None:
        return Interval(-math.inf, -math.inf, math.inf)
    return Interval(-value, -value * (1 + noise), -value * (1 - noise))
