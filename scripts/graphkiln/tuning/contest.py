"""Comparison of candidates by one objective: the measurements of each, and when one is better than another.

`RateContest` finds the highest rate that meets the p99. In an open loop a higher rate makes longer queues, so that the
rate can be bracketed. Rates are compared by the estimate of p99 under the same arrivals; the rate of the result is
confirmed by its bound (`search.confirm`).

`LoadContest` compares latency, memory or cost under a given load.

Near-ties are raced (`search`): all get the same load in several rounds. Of both contests, `race_by` names the compared
cost (empty if repeated measurements give no new information), `fewest_rounds` is the number of rounds before a
candidate can be eliminated, `least_spread` is the assumed minimum of the standard deviation of the cost's logarithm,
and with `defends_today` today's configuration always takes part.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from graphkiln.tuning.candidate import INSTANCES, MAX_BATCH_SIZE, Candidate
from graphkiln.tuning.drift import Reference
from graphkiln.tuning.statistics import Interval, requests_needed
from graphkiln.tuning.target import Objective, Target
from graphkiln.tuning.trials import ClosedLoop, Failed, LoadShape, Measured, OpenLoop

# Minimum number of requests of a measurement under a given load.
_FEWEST = 60


@dataclass(frozen=True, kw_only=True, slots=True)
class Point:
    """A load and its measurement."""

    load: LoadShape
    measured: Measured


@dataclass(frozen=True, kw_only=True, slots=True)
class CandidateScore:
    """A candidate with its measurements and score.

    Attributes:
        candidate: The candidate.
        score: Higher is better. `lower` was reached (if the target was missed, 0 for a rate and minus infinity for
            other objectives); `upper` is not ruled out yet.
        rate_bound: Upper bound on requests per second from its session without a server.
        points: All measurements, in order.
        lost: Reason why the candidate was eliminated; "" if it was not.
    """

    candidate: Candidate
    score: Interval
    rate_bound: float = math.inf
    points: tuple[Point, ...] = ()
    lost: str = ""

    def out(self, reason: str) -> CandidateScore:
        """Return this score marked as lost."""
        return replace(self, lost=reason)


# Ratio of two rates that ends the bisection.
RESOLUTION = 1.03
# Factors for the next rate: on the capacity at first, then on each failed rate.
_FIRST, _NEXT = 0.8, 0.5
# Minimum rate as a share of the capacity.
_SLOWEST = 1 / 40
_STEPS = 10
# Number of requests above p99 in one measurement: with fewer than ten, the estimate is unreliable.
_SLOWER = 10
# Failures are repeated, with another seed, at rates up to `_IDLE` of the capacity and above `_NEARBY` of a passed rate.
_IDLE, _NEARBY, _AGAIN = 0.6, 1.25, 100
# Minimum share of the best rate for a near-tie.
NEAR = 0.93
# Number of rates at which a failure may be attributed to a stall of the machine.
_EXCUSED = 2
# A p99 that after `_FLAT` rates has only dropped to this share of the previous one will not reach the target.
_FLAT, _NO_LOWER = 3, 0.8
# Maximum ratio of the rate of an open loop to that of a closed loop, because its batches are fuller.
_MARGIN = 1.05


@dataclass(frozen=True, kw_only=True, slots=True)
class Bracket:
    """Bounds on the rate of a candidate.

    Attributes:
        passed: Highest rate with an estimated p99 within the target; 0 for none.
        failed: Lowest higher rate with an estimated p99 above the target, or the capacity.
        refuted: Lowest rate with a p99 significantly above the target, or the capacity.
        capacity: Upper bound on all rates.
    """

    passed: float
    failed: float
    refuted: float
    capacity: float

    @property
    def next_rate(self) -> float:
        """The next rate to measure."""
        if self.passed:
            return math.sqrt(self.passed * self.failed)
        return self.failed * (_FIRST if self.failed == self.capacity else _NEXT)

    @property
    def is_narrow(self) -> bool:
        """True if passed and failed rates are within `RESOLUTION`."""
        return self.failed <= self.passed * RESOLUTION


class RateContest:
    """Search for the highest rate that meets the target; the score is a rate."""

    race_by = "p99 at the same rate"
    fewest_rounds, least_spread = 2, 0.02
    defends_today = False

    def __init__(self, reference: Reference, target: Target, shortest_s: float, longest_s: float) -> None:
        self._reference, self._target = reference, target
        self._shortest_s, self._longest_s = shortest_s, longest_s

    def enter(self, candidate: Candidate, rate_bound: float) -> CandidateScore:
        """Return the score before the first measurement, given the bound of the session."""
        return CandidateScore(candidate=candidate, score=Interval(rate_bound, 0.0, rate_bound), rate_bound=rate_bound)

    def advance(self, scored: CandidateScore, seconds: float, reached: float) -> CandidateScore:
        """Measure once for about `seconds`; `reached` is the best rate of another candidate.

        If no candidate has reached a rate yet, the first measurement determines the capacity, with enough callers to
        fill every batch of every instance. Otherwise the candidate must first meet the target at the best rate.
        """
        if not scored.points and not reached > 0:
            candidate = scored.candidate
            callers = 2 * candidate.number(INSTANCES) * max(1, candidate.number(MAX_BATCH_SIZE))
            return self._measure(scored, ClosedLoop(callers), max(seconds, self._shortest_s))
        bracket = self.bracket(scored)
        untried = bracket.passed < reached < bracket.failed
        return self._try_rate(scored, reached if untried else bracket.next_rate, seconds)

    def settle(self, scored: CandidateScore, reached: float) -> CandidateScore:
        """Measure until the rate is exact or below `reached`."""
        for _ in range(_STEPS):
            bracket = self.bracket(scored)
            slowest = _capacity(scored) * _SLOWEST if scored.points else 0.0
            if scored.lost or bracket.is_narrow or bracket.failed <= max(reached, slowest) or self._is_flat(scored):
                break
            if not self._affords(scored, bracket.next_rate):
                break
            scored = self.advance(scored, 0.0, reached)
        return scored

    def is_tie(self, scored: CandidateScore, best: CandidateScore) -> bool:
        """Return true if both reached rates within the resolution."""
        return scored.score.lower * RESOLUTION >= best.score.lower > 0

    def describe(self, score: float) -> str:
        """Format a score with its unit."""
        return f"{score:.3g} requests per second" if math.isfinite(score) and score > 0 else "no rate"

    def race_load(self, best: CandidateScore) -> tuple[LoadShape, float]:
        """Return the load of a race, which is the rate of the best, and the seconds of each measurement."""
        rate = float(f"{best.score.lower:.4g}")
        return OpenLoop(rate), min(requests_needed(_SLOWER) / rate, self._longest_s)

    def race_cost(self, measured: Measured) -> float:
        """Return the cost of a measurement: its p99."""
        return measured.latency.p99.value

    def may_race(self, scored: CandidateScore, best: CandidateScore) -> bool:
        """Return true if a candidate is close enough to the best to race against it."""
        return scored.score.value >= NEAR * best.score.lower

    def race_score(self, winner: CandidateScore, load: LoadShape) -> Interval:
        """Return the score of the winner of a race."""
        rate = load.rate if isinstance(load, OpenLoop) else 0.0
        return Interval(max(winner.score.value, rate), rate, max(winner.score.upper, rate))

    def race_errors(self, rounds: int) -> float:
        """Return how many standard errors are significant: few, because a wrong choice among near-ties costs little."""
        del rounds
        return 1.5

    def bracket(self, scored: CandidateScore) -> Bracket:
        """Compute the bracket from a candidate's points; of two contradictory ones the later counts."""
        passes: list[float] = []
        fails: dict[float, bool] = {}  # rate -> whether its p99 is significantly above the target
        for point in scored.points:
            if isinstance(point.load, OpenLoop):
                rate, p99 = point.load.rate, point.measured.latency.p99
                keeps_up = point.measured.keeps_up
                if keeps_up and p99.value <= self._target.p99_s:
                    passes.append(rate)
                    fails = {each: surely for each, surely in fails.items() if each > rate}
                else:
                    fails[rate] = not keeps_up or p99.lower > self._target.p99_s
                    passes = [each for each in passes if each < rate]
        capacity = max([_capacity(scored), *passes])
        return Bracket(
            passed=max(passes, default=0.0),
            failed=min([capacity, *fails]),
            refuted=min([capacity, *(each for each, surely in fails.items() if surely)]),
            capacity=capacity,
        )

    def _try_rate(self, scored: CandidateScore, rate: float, seconds: float) -> CandidateScore:
        """Measure a rate; repeat it if it failed far below the capacity.

        Queues are short far below the capacity, so that a failure there is probably caused by a stall of the machine.
        It would rule out all higher rates.
        """
        tried = self._try_once(scored, rate, seconds)
        excused = len({each.load for each in self._standstills(tried)}) <= _EXCUSED
        if tried.lost or not (excused and self._is_strange(tried, rate) and self._affords(tried, rate)):
            return tried
        return self._try_once(tried, rate, seconds, _AGAIN)

    def _try_once(self, scored: CandidateScore, rate: float, seconds: float, seed: int = 0) -> CandidateScore:
        """Measure a rate, after a short measurement that detects clear failures early."""
        long_s = self._long_enough(seconds, rate)
        short_s = max(self._shortest_s, _FEWEST / rate)
        if long_s > 3 * short_s:
            scored = self._measure(scored, OpenLoop(rate), short_s, seed)
            if scored.lost or self.bracket(scored).refuted <= rate:
                return scored
        return self._measure(scored, OpenLoop(rate), long_s, seed)

    def _measure(self, scored: CandidateScore, load: LoadShape, seconds: float, seed: int = 0) -> CandidateScore:
        outcome = self._reference.measure(scored.candidate, load, seconds, seed)
        if isinstance(outcome, Failed):
            return scored.out(outcome.reason)
        longer = replace(scored, points=(*scored.points, Point(load=load, measured=outcome)))
        bracket = self.bracket(longer)
        guess = math.sqrt(bracket.passed * bracket.failed) if bracket.passed else self._guess(longer, bracket)
        return replace(longer, score=Interval(min(guess, bracket.refuted), bracket.passed, bracket.refuted))

    def _guess(self, scored: CandidateScore, bracket: Bracket) -> float:
        """Guess a rate before any met the target: the higher p99 with full batches, the lower."""
        full_s = [each.measured.latency.p99.value for each in scored.points if isinstance(each.load, ClosedLoop)]
        return bracket.next_rate * min([1.0, *(math.sqrt(self._target.p99_s / each) for each in full_s)])

    def _is_strange(self, scored: CandidateScore, rate: float) -> bool:
        """Return true if a rate failed far below the capacity and far above `passed` despite a low median."""
        bracket = self.bracket(scored)
        is_far = rate > _NEARBY * bracket.passed
        return is_far and bracket.failed <= rate and scored.points[-1] in self._standstills(scored)

    def _standstills(self, scored: CandidateScore) -> list[Point]:
        """Return points far below the capacity with a low median and a high p99, which no queue explains."""
        highest, target_s = _IDLE * _capacity(scored), self._target.p99_s
        idle = [each for each in scored.points if isinstance(each.load, OpenLoop) and each.load.rate <= highest]
        latencies = [(each, each.measured.latency) for each in idle]
        return [each for each, latency in latencies if latency.p50_s <= target_s / 2 and latency.p99.value > target_s]

    def _is_flat(self, scored: CandidateScore) -> bool:
        """Return true if lower rates do not lower p99, so that the queue is not the cause."""
        if self.bracket(scored).passed:
            return False
        p99_s = {
            each.load.rate: each.measured.latency.p99.value for each in scored.points if isinstance(each.load, OpenLoop)
        }
        if len(p99_s) < _FLAT:
            return False
        lowest, next_one = sorted(p99_s)[:2]
        return p99_s[lowest] > max(_NO_LOWER * p99_s[next_one], 2 * self._target.p99_s)

    def _affords(self, scored: CandidateScore, rate: float) -> bool:
        return self._reference.affords(scored.candidate, self._long_enough(0.0, rate))

    def _long_enough(self, seconds: float, rate: float) -> float:
        """Return enough seconds for a bound that `_SLOWER` requests may exceed, within the limits."""
        return min(max(seconds, self._shortest_s, requests_needed(_SLOWER) / rate), self._longest_s)


def _capacity(scored: CandidateScore) -> float:
    """Upper bound on the rate by measurements in a closed loop and by the session without a server."""
    closed = [point.measured for point in scored.points if isinstance(point.load, ClosedLoop)]
    return min([scored.rate_bound, *(measured.throughput.upper * _MARGIN for measured in closed)])


# Relative differences of repeated measurements; smaller differences count as equal.
_MEMORY_NOISE, _COST_NOISE = 0.02, 0.05
# Relative difference of p99 between two starts of the same server.
_ALIKE = {Objective.LATENCY: 0.1}
# Maximum cost of a near-tie as a multiple of the best one's.
_NEAR_COST = 1.25
# Number of rounds -> one-sided 95% quantile of Student's t.
_STUDENT_T = {3: 2.92, 4: 2.35, 5: 2.13}
_DOUBLINGS = 4
# Factor on the duration of a repeated measurement after a possible stall of the machine.
_LONGER = 4


class LoadContest:
    """Search for the lowest latency, memory or cost under a load; the score is the negated value.

    The load is the target's rate, otherwise one caller.
    """

    fewest_rounds, least_spread = min(_STUDENT_T), 0.05
    defends_today = True

    def __init__(self, reference: Reference, target: Target, shortest_s: float, longest_s: float) -> None:
        self._reference, self._target = reference, target
        self._shortest_s, self._longest_s = shortest_s, longest_s
        self.load: LoadShape = OpenLoop(target.rate) if target.rate else ClosedLoop(1)
        # Memory does not vary: a race would give no new information.
        by = {Objective.LATENCY: "p99 under the same load", Objective.COST: "CPU time of a request"}
        self.race_by = by.get(target.objective, "")

    def enter(self, candidate: Candidate, rate_bound: float) -> CandidateScore:
        """Return the score before the first measurement."""
        return CandidateScore(candidate=candidate, score=Interval(0.0, -math.inf, math.inf), rate_bound=rate_bound)

    def advance(self, scored: CandidateScore, seconds: float, reached: float) -> CandidateScore:
        """Measure once for about `seconds`, but long enough for the rate."""
        del reached  # all candidates get the same load
        enough_s = _FEWEST / self._target.rate if self._target.rate else 0.0
        return self._measure(scored, min(max(seconds, enough_s), self._longest_s))

    def settle(self, scored: CandidateScore, reached: float) -> CandidateScore:
        """Double the duration until the bounds on p99 are on one side of the target."""
        del reached
        seconds = enough_s = self._needed_s(scored)
        longest_s = max(self._longest_s, 4 * seconds)  # low rates need more time
        for _ in range(_DOUBLINGS):
            is_long = bool(scored.points) and scored.points[-1].measured.seconds >= enough_s * 0.99
            if scored.lost or (is_long and math.isfinite(scored.score.lower)):
                break
            if not self._reference.affords(scored.candidate, min(seconds, longest_s)):
                break
            scored = self._measure(scored, min(seconds, longest_s))
            if seconds >= longest_s:
                break
            seconds *= 2
        return self._judge_widely(scored)

    def is_tie(self, scored: CandidateScore, best: CandidateScore) -> bool:
        """Return true if two candidates that meet the target do not differ significantly."""
        score, alike = scored.score, _ALIKE.get(self._target.objective, 0.0)
        is_near = score.value >= best.score.value * (1 + alike)
        return math.isfinite(score.lower) and (is_near or not best.score.is_above(score))

    def describe(self, score: float) -> str:
        """Format a score with its unit."""
        if not math.isfinite(score):
            return "nothing that meets the target"
        unit = {
            Objective.MEMORY: f"{-score / 2**20:.0f} MiB",
            Objective.COST: f"{-score * 1e3:.3g} CPU ms a request",
        }
        return unit.get(self._target.objective, f"p99 {-score * 1e3:.3g} ms")

    def race_load(self, best: CandidateScore) -> tuple[LoadShape, float]:
        """Return the load of a race, and the seconds of each measurement."""
        return self.load, min(self._needed_s(best), self._longest_s)

    def race_cost(self, measured: Measured) -> float:
        """Return the cost of a measurement: the negated score."""
        return max(-self._score(measured).value, 1e-9)

    def may_race(self, scored: CandidateScore, best: CandidateScore) -> bool:
        """Return true if a candidate meets the target and is close enough to the best to race against it."""
        has_met = not scored.lost and math.isfinite(scored.score.lower)
        return has_met and (self.is_tie(scored, best) or scored.score.value >= _NEAR_COST * best.score.value)

    def race_score(self, winner: CandidateScore, load: LoadShape) -> Interval:
        """Return the score of the winner of a race."""
        del load
        return winner.score

    def race_errors(self, rounds: int) -> float:
        """Return how many standard errors are a significant difference after a number of rounds."""
        return _STUDENT_T[min(rounds, max(_STUDENT_T))]

    def _measure(self, scored: CandidateScore, seconds: float) -> CandidateScore:
        """Measure; repeat if a stall of the machine may have caused a failure.

        The repetition is so long that a single stall affects less than a hundredth of it, while repeated stalls of the
        candidate show again. It begins with the same arrivals, so that bursts repeat as well.
        """
        first = self._measure_once(scored, seconds)
        again_s = min(max(_LONGER * seconds, self._needed_s(first)), max(self._longest_s, seconds))
        was_measured = first.points != scored.points
        if not was_measured or not self._is_strange(first.points[-1].measured) or again_s < 2 * seconds:
            return first
        if not self._reference.affords(scored.candidate, again_s):
            return first
        return self._measure_once(replace(first, lost=""), again_s)

    def _is_strange(self, measured: Measured) -> bool:
        """Return true if p99 is significantly above the target despite a low median and no growing queue."""
        is_quick = measured.latency.p50_s <= self._target.p99_s / 2
        return is_quick and measured.keeps_up and measured.latency.p99.lower > self._target.p99_s

    def _measure_once(self, scored: CandidateScore, seconds: float) -> CandidateScore:
        outcome = self._reference.measure(scored.candidate, self.load, seconds)
        if isinstance(outcome, Failed):
            return scored.out(outcome.reason)
        scored = replace(scored, points=(*scored.points, Point(load=self.load, measured=outcome)))
        score = self._score(outcome)
        if not math.isfinite(score.value) and self._target.objective is not Objective.LATENCY:
            unknown = "memory" if self._target.objective is Objective.MEMORY else "CPU time"
            return scored.out(f"its {unknown} cannot be read here")
        unmet = Interval(score.value, -math.inf, score.upper)
        if reason := self._missed(outcome):
            return replace(scored, score=unmet).out(reason)
        return replace(scored, score=score if outcome.latency.p99.upper <= self._target.p99_s else unmet)

    def _judge_widely(self, scored: CandidateScore) -> CandidateScore:
        """Use the wide bound if the distribution-free one is undecided."""
        if scored.lost or not scored.points or math.isfinite(scored.score.lower):
            return scored
        latency, score = scored.points[-1].measured.latency, scored.score
        if latency.p99_at_most_s > self._target.p99_s:
            return scored
        if self._target.objective is Objective.LATENCY:
            return replace(scored, score=Interval(score.value, -latency.p99_at_most_s, score.upper))
        return replace(scored, score=self._score(scored.points[-1].measured))

    def _missed(self, measured: Measured) -> str:
        """Return why the target is significantly missed, or ""."""
        p99 = measured.latency.p99
        if self._target.rate and not measured.keeps_up:
            return f"answers {measured.throughput.value:.3g} of {measured.due_per_s:.3g} requests per second"
        if p99.lower > self._target.p99_s:
            at_least = f", at least {p99.lower * 1e3:.3g} ms" if math.isfinite(p99.lower) else ""
            return f"{measured.latency.p99_words}{at_least}"
        return ""

    def _score(self, measured: Measured) -> Interval:
        if self._target.objective is Objective.MEMORY:
            return _negated(measured.memory_bytes, _MEMORY_NOISE)
        if self._target.objective is Objective.COST:
            used = measured.server_cores
            return _negated(None if used is None else used / max(measured.throughput.value, 1e-9), _COST_NOISE)
        p99 = measured.latency.p99
        return Interval(-p99.value, -p99.upper, -p99.lower)

    def _needed_s(self, scored: CandidateScore) -> float:
        """Return the seconds for a bound that five requests may exceed, at the given or the reached rate."""
        reached = scored.points[-1].measured.throughput.value if scored.points else 1 / self._target.p99_s
        return max(self._shortest_s, requests_needed(5) / (self._target.rate or max(reached, 1e-3)))


def _negated(value: float | None, noise: float) -> Interval:
    """Negate a value, with a relative noise, into a score; minus infinity if the value is unknown."""
    if value is None:
        return Interval(-math.inf, -math.inf, math.inf)
    return Interval(-value, -value * (1 + noise), -value * (1 - noise))


Contest = RateContest | LoadContest
