"""The contest for the highest rate that meets a p99: a bracket of rates for each candidate, halved step by step.

Under a rate that nothing slows down (open loop) more requests make longer queues, so that rates that meet the target
lie below those that do not. All candidates get the same arrivals, which are most of what is random about a p99: what
differs is theirs. Rates are therefore compared by the estimate of p99; its bound decides about the one that is promised
(`confirmation`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from graphkiln.tuning.candidate import INSTANCES, MAX_BATCH_SIZE, Candidate
from graphkiln.tuning.drift import Reference
from graphkiln.tuning.standing import Point, Race, Standing
from graphkiln.tuning.statistics import Interval, requests_needed
from graphkiln.tuning.target import Target
from graphkiln.tuning.trials import ClosedLoop, Failed, LoadShape, OpenLoop

RESOLUTION = 1.03
"""Ratio of two rates that are told apart no further."""
_FIRST, _NEXT = 0.8, 0.5
"""Share of the capacity that is tried first, and of each rate that failed what is tried next."""
_SLOWEST = 1 / 40
"""Share of the capacity below which no rate is tried."""
_STEPS = 10
_SLOWER = 10
"""Requests that exceed the p99 bound of one measurement: below ten, its estimate is a matter of luck."""
_FEWEST = 60
"""Requests of a short look."""
_IDLE, _NEARBY, _AGAIN = 0.6, 1.25, 100
"""A failure is asked for again up to this share of the capacity, beyond so many times what passed, with this seed."""
NEAR = 0.93
"""Share of the best rate from which on a candidate may be as good."""
_SURE = 1.5
"""Standard errors between two that are told apart: a wrong choice among near-ties costs little."""
_ROUNDS, _LEAST_SPREAD = 2, 0.02
"""Of near-ties that are measured again at least, and of the logarithm of their p99 however alike two rounds are."""
_EXCUSED = 2
"""Rates at which what one candidate fails may be a stall of the machine: more are its own doing."""
_FLAT, _NO_LOWER = 3, 0.8
"""Rates after which a p99 that only falls to this share of the one before does not come down to the target."""
_MARGIN = 1.05
"""How much more an open loop may reach than a closed one: batches that are fuller."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Bracket:
    """What the points of a candidate say of its rates.

    Attributes:
        passed: Highest at which p99 is within the target, by its estimate; 0 where none is.
        failed: Lowest above that at which it is not, or the capacity.
        refuted: Lowest at which p99 cannot be within the target, or the capacity.
        capacity: What no rate can be above.
    """

    passed: float
    failed: float
    refuted: float
    capacity: float

    @property
    def next_rate(self) -> float:
        """What to try next."""
        if self.passed:
            return math.sqrt(self.passed * self.failed)
        return self.failed * (_FIRST if self.failed == self.capacity else _NEXT)

    @property
    def is_narrow(self) -> bool:
        """Whether there is nothing left between what passed and what failed."""
        return self.failed <= self.passed * RESOLUTION


class RateContest:
    """Implements `Contest`; a score is a rate.

    Args:
        reference: Measures.
        target: Without a rate.
        shortest_s: Of one measurement.
        longest_s: Of one measurement.
    """

    def __init__(self, reference: Reference, target: Target, shortest_s: float, longest_s: float) -> None:
        self._reference, self._target = reference, target
        self._shortest_s, self._longest_s = shortest_s, longest_s

    def enter(self, candidate: Candidate, rate_bound: float) -> Standing:
        """See `Contest`."""
        return Standing(candidate=candidate, score=Interval(rate_bound, 0.0, rate_bound), rate_bound=rate_bound)

    def advance(self, standing: Standing, seconds: float, reached: float) -> Standing:
        """See `Contest`.

        Where no rate is reached yet, the first measurement finds the capacity: callers that fill every batch of every
        instance. Where one is, the first question is whether the candidate meets the target at that rate, too.
        """
        if not standing.points and not reached > 0:
            candidate = standing.candidate
            callers = 2 * candidate.number(INSTANCES) * max(1, candidate.number(MAX_BATCH_SIZE))
            return self._measured(standing, ClosedLoop(callers), max(seconds, self._shortest_s))
        bracket = self.bracket(standing)
        untried = bracket.passed < reached < bracket.failed
        rate = reached if untried else bracket.next_rate
        return self._ask(standing, rate, seconds)

    def settle(self, standing: Standing, reached: float) -> Standing:
        """See `Contest`."""
        for _ in range(_STEPS):
            bracket = self.bracket(standing)
            slowest = _capacity(standing) * _SLOWEST if standing.points else 0.0
            if standing.lost or bracket.is_narrow or bracket.failed <= max(reached, slowest) or self._is_flat(standing):
                break
            if not self._affords(standing, bracket.next_rate):
                break
            standing = self.advance(standing, 0.0, reached)
        return standing

    def is_tie(self, standing: Standing, best: Standing) -> bool:
        """See `Contest`: both reached a rate, no further apart than rates are told apart."""
        return standing.score.lower * RESOLUTION >= best.score.lower > 0

    def race(self, best: Standing) -> Race:
        """See `Contest`: at the rate of the best, by the p99."""
        rate = float(f"{best.score.lower:.4g}")
        return Race(
            load=OpenLoop(rate),
            seconds=min(requests_needed(_SLOWER) / rate, self._longest_s),
            cost=lambda measured: measured.latency.p99.value,
            what="p99 at the same rate",
            is_near=lambda each: each.score.value >= NEAR * best.score.lower,
            reached=lambda each: Interval(max(each.score.value, rate), rate, max(each.score.upper, rate)),
            sure=lambda _: _SURE,
            fewest=_ROUNDS,
            spread=_LEAST_SPREAD,
        )

    def describe(self, score: float) -> str:
        """See `Contest`."""
        return f"{score:.3g} requests per second" if math.isfinite(score) and score > 0 else "no rate"

    def bracket(self, standing: Standing) -> Bracket:
        """What the points say; of two that contradict each other the later one counts."""
        passes: list[float] = []
        fails: dict[float, bool] = {}
        for point in standing.points:
            if isinstance(point.load, OpenLoop):
                rate, p99 = point.load.rate, point.measured.latency.p99
                keeps_up = point.measured.keeps_up
                if keeps_up and p99.value <= self._target.p99_s:
                    passes.append(rate)
                    fails = {each: surely for each, surely in fails.items() if each > rate}
                else:
                    fails[rate] = not keeps_up or p99.lower > self._target.p99_s
                    passes = [each for each in passes if each < rate]
        capacity = max([_capacity(standing), *passes])
        return Bracket(
            passed=max(passes, default=0.0),
            failed=min([capacity, *fails]),
            refuted=min([capacity, *(each for each, surely in fails.items() if surely)]),
            capacity=capacity,
        )

    def _measured(self, standing: Standing, load: LoadShape, seconds: float, seed: int = 0) -> Standing:
        outcome = self._reference.measure(standing.candidate, load, seconds, seed)
        if isinstance(outcome, Failed):
            return standing.out(outcome.reason)
        longer = replace(standing, points=(*standing.points, Point(load=load, measured=outcome)))
        bracket = self.bracket(longer)
        guess = math.sqrt(bracket.passed * bracket.failed) if bracket.passed else self._hope(longer, bracket)
        return replace(longer, score=Interval(min(guess, bracket.refuted), bracket.passed, bracket.refuted))

    def _ask(self, standing: Standing, rate: float, seconds: float) -> Standing:
        """Whether a rate meets the target; asked once more where it is no rate to fail at.

        Far below what callers get there is no queue that takes long. What fails there may be a stall of the
        machine: taken for an answer, it would cut off all rates above.
        """
        asked = self._ask_once(standing, rate, seconds)
        is_strange = self._is_strange(asked, rate) and len({each.load for each in self._standstills(asked)}) <= _EXCUSED
        if asked.lost or not (is_strange and self._affords(asked, rate)):
            return asked
        return self._ask_once(asked, rate, seconds, _AGAIN)

    def _is_strange(self, standing: Standing, rate: float) -> bool:
        """Whether a rate failed far below the capacity, and far above what passed, while most requests are quick."""
        bracket = self.bracket(standing)
        is_far = rate > _NEARBY * bracket.passed
        return is_far and bracket.failed <= rate and standing.points[-1] in self._standstills(standing)

    def _standstills(self, standing: Standing) -> list[Point]:
        """Where most requests are quick, the slowest are not, and no queue is why: time and again, the candidate is."""
        highest, target_s = _IDLE * _capacity(standing), self._target.p99_s
        idle = [each for each in standing.points if isinstance(each.load, OpenLoop) and each.load.rate <= highest]
        latencies = [(each, each.measured.latency) for each in idle]
        return [each for each, latency in latencies if latency.p50_s <= target_s / 2 and latency.p99.value > target_s]

    def _is_flat(self, standing: Standing) -> bool:
        """Whether half the rate makes p99 no lower, so that no rate will: it is not the queue that takes so long."""
        if self.bracket(standing).passed:
            return False
        p99_s = {
            each.load.rate: each.measured.latency.p99.value
            for each in standing.points
            if isinstance(each.load, OpenLoop)
        }
        lowest = sorted(p99_s)[:2]
        if len(p99_s) < _FLAT:
            return False
        return p99_s[lowest[0]] > max(_NO_LOWER * p99_s[lowest[1]], 2 * self._target.p99_s)

    def _ask_once(self, standing: Standing, rate: float, seconds: float, seed: int = 0) -> Standing:
        """Where it takes long to say, a short look first, which shows what surely fails."""
        long_s = self._long_enough(seconds, rate)
        short_s = max(self._shortest_s, _FEWEST / rate)
        if long_s > 3 * short_s:
            standing = self._measured(standing, OpenLoop(rate), short_s, seed)
            if standing.lost or self.bracket(standing).refuted <= rate:
                return standing
        return self._measured(standing, OpenLoop(rate), long_s, seed)

    def _affords(self, standing: Standing, rate: float) -> bool:
        return self._reference.affords(standing.candidate, self._long_enough(0.0, rate))

    def _hope(self, standing: Standing, bracket: Bracket) -> float:
        """A guess before any rate met the target: less than the capacity by as much as callers waited too long there.

        Callers that fill every batch show how long a request takes at most when batches are full.
        """
        full_s = [each.measured.latency.p99.value for each in standing.points if isinstance(each.load, ClosedLoop)]
        share = min([1.0, *(math.sqrt(self._target.p99_s / each) for each in full_s)])
        return bracket.next_rate * share

    def _long_enough(self, seconds: float, rate: float) -> float:
        """At least so many seconds, and with enough requests for a bound that `_SLOWER` of them may exceed."""
        return min(max(seconds, self._shortest_s, requests_needed(_SLOWER) / rate), self._longest_s)


def _capacity(standing: Standing) -> float:
    """The highest rate that is not out of reach: what callers in a closed loop got, and what bare sessions allow."""
    closed = [point.measured for point in standing.points if isinstance(point.load, ClosedLoop)]
    return min([standing.rate_bound, *(measured.throughput.upper * _MARGIN for measured in closed)])
