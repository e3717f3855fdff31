"""The search: from a space and a target to a configuration that is confirmed to meet the target.

1. Sessions are timed without a server, which rules out candidates that no scheduler can make fast enough (`probe`).
2. Successive halving: short measurements of the remaining candidates, or of as many as the budget allows, then longer
   ones of the survivors. A candidate is eliminated if the most it can reach is below what another one has reached, or
   if it ranks below the best third (a heuristic: the search later looks around the best).
3. The finalists are measured until their scores are exact, then the neighbors of the best while they improve it.
4. Near-ties race under the same load. The simplest of those without a significant difference is chosen.
5. The choice is measured once more: its bound on p99 is the promise (`confirm`). If the budget ends the search before a
   candidate met the target, the likeliest one is measured in the rest.

There is no surrogate model: bounds and dominance decide most candidates with one measurement, and every rejection has a
readable reason. The search is a deterministic function of the outcomes, so that it continues from a journal.

Sources: K. Jamieson, A. Talwalkar, "Non-stochastic Best Arm Identification and Hyperparameter Optimization" (2016);
M. Birattari and others, "A Racing Algorithm for Configuring Metaheuristics" (2002), with paired differences.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import zip_longest

from graphkiln.tuning.candidate import SESSION_KEYS, Candidate
from graphkiln.tuning.contest import CandidateScore, Contest, LoadContest, Point, RateContest
from graphkiln.tuning.drift import Reference
from graphkiln.tuning.journal import RecordedTrials
from graphkiln.tuning.result import Result, Row, closest_row, has_reached, knee, limit_of, pareto_front
from graphkiln.tuning.space import Exclusion, Space, bound_of, objection
from graphkiln.tuning.statistics import requests_needed
from graphkiln.tuning.target import Objective, Target
from graphkiln.tuning.trials import ClosedLoop, Failed, LoadShape, Measured, OpenLoop, SessionTiming, Trials

# Confirmation: a longer measurement with other arrivals and without conversion of the machine's speed.

_SEED = 77_000_000
# Maximum number of measurements, and number of slices of the remaining budget.
_TRIES, _SLICES = 8, 5
# Factors on a rate: before the last affordable measurement, after a p99 above the target, and after only the bound was
# above it.
_LARGE_STEP, _STEP, _SMALL_STEP = 0.75, 0.9, 0.93
# Number of requests above a tight bound, and the minimum for finding a bound at all.
_SLOWER, _FEW_SLOWER = 100, 5
# The minimum in independent requests, and the number of requests of a measurement that gives a reliable inflation.
_CERTAIN, _COUNTED = 1, 100
_SHORTEST_S = 5.0
# Factor on the duration of the second measurement of a load that missed the target.
_LONGER = 2
# Additional rates of the latency curve as shares of the promised rate.
_CURVE = (0.25, 0.5, 0.7, 0.85, 1.1)


def confirm(trials: RecordedTrials, scored: CandidateScore, target: Target, level: float) -> tuple[Point | None, str]:
    """Measure a candidate under the load to be promised; lower a free rate until the target is met.

    Args:
        trials: Performs measurements within its budget, but at least one.
        scored: Candidate with its score from the search.
        target: Required p99 and optional rate.
        level: Current speed of the machine, relative to that of the score.

    Returns:
        The confirmed load with its measurement and the failure of an earlier attempt ("" for none), or None with the
        reason.
    """
    is_free = target.objective is Objective.THROUGHPUT
    rate = scored.score.lower * min(level, 1.0) if is_free else target.rate
    one_caller_per_s = max(scored.points[-1].measured.throughput.value if scored.points else 1.0, 1e-3)
    budget, candidate = trials.budget, scored.candidate
    reason, slice_s = "its figures were not measured again", (budget.left_s - budget.start_s) / _SLICES
    inflation, doubt = _inflation_of(scored, target.p99_s), ""

    for number in range(_TRIES):
        if number and budget.left_s < budget.needed_s(candidate, _SHORTEST_S):
            return None, f"{reason}, and the budget is spent"
        if rate and is_free and budget.left_s < 2 * budget.needed_s(candidate, _enough_s(slice_s, rate, inflation)):
            rate *= _LARGE_STEP  # the last affordable measurement: prefer a lower promise to none
        load: LoadShape = OpenLoop(float(f"{rate:.4g}")) if rate else ClosedLoop(1)
        per_s = load.rate if isinstance(load, OpenLoop) else one_caller_per_s
        wanted_s = min(
            requests_needed(_SLOWER) / per_s, _enough_s(slice_s, per_s, inflation) * (_LONGER if doubt else 1)
        )
        seconds = max(_SHORTEST_S, min(wanted_s, budget.left_s - budget.needed_s(candidate, 0.0)))
        outcome = trials.measure(candidate, load, round(seconds, 3), _SEED + number)
        if isinstance(outcome, Failed):
            return None, outcome.reason
        p99 = outcome.latency.p99
        if outcome.latency.p99_at_most_s <= target.p99_s and outcome.keeps_up:
            return Point(load=load, measured=outcome), doubt
        reason = _missed(outcome, target.p99_s)
        if p99.value <= target.p99_s:
            inflation = outcome.latency.inflation  # meaningless while a queue grows
        if rate and is_free:
            rate *= _STEP if p99.value > target.p99_s else _SMALL_STEP
        elif p99.value > target.p99_s or not outcome.keeps_up:
            if doubt:
                break
            doubt = reason  # retry once: the machine may have stalled
    return None, reason


def sweep(
    trials: RecordedTrials, candidate: Candidate, promise: Point, seconds: float
) -> tuple[tuple[Point, ...], str]:
    """Measure latency around the promised rate, at as many rates as the budget allows.

    Returns:
        The points by rate, and the failure at another rate ("" for none).
    """
    if not isinstance(promise.load, OpenLoop):
        return (), ""
    points, failure = {promise.load.rate: promise}, ""
    for share in _CURVE:
        if trials.budget.left_s < 1.5 * trials.budget.needed_s(candidate, seconds):
            break
        load = OpenLoop(float(f"{promise.load.rate * share:.4g}"))
        outcome = trials.measure(candidate, load, seconds, _SEED - 1)
        if isinstance(outcome, Failed):
            failure = f"at {load.rate:g} requests per second, beside the promise, it failed: {outcome.reason}"
            break
        points[load.rate] = Point(load=load, measured=outcome)
    return tuple(points[rate] for rate in sorted(points)), failure


def _missed(measured: Measured, p99_s: float) -> str:
    """Return why a measurement is not a confirmation: too slow, growing queue, or too short for the bound."""
    latency = measured.latency
    if latency.p99.value > p99_s:
        return f"{latency.p99_words} when measured again"
    if not measured.keeps_up:
        reached = f"{measured.throughput.value:.3g} of {measured.due_per_s:.3g}"
        return f"only {reached} requests per second were answered when measured again: the queue grows"
    return f"{latency.p99_words} when measured again, but {latency.count} requests are too few to confirm the target"


def _inflation_of(scored: CandidateScore, p99_s: float) -> float:
    """Return the median inflation of the points that met the target; 1 if unknown."""
    latencies = [point.measured.latency for point in scored.points if isinstance(point.load, OpenLoop)]
    within = [each for each in latencies if each.p99.value <= p99_s and each.count >= _COUNTED]
    return statistics.median(each.inflation for each in within) if within else 1.0


def _enough_s(slice_s: float, requests_per_s: float, inflation: float) -> float:
    """Return the seconds of a slice of the budget, or more if a bound needs more requests."""
    requests = max(requests_needed(_FEW_SLOWER), inflation * requests_needed(_CERTAIN))
    return max(slice_s, requests / requests_per_s)


# Shares of the budget: for timing sessions and for the first rung; then the shares after which no rung begins, no
# candidate is settled, and no race continues.
_PROBING, _FIRST_RUNG, _HALVING, _SEARCHING, _RACING = 0.3, 0.25, 0.5, 0.7, 0.75
FINALISTS = 4
_RUNGS = 6
# Reciprocal of the share of a rung's candidates that advances.
_KEPT = 3
# Number of candidates between two checks of the machine's speed.
_CHUNK = 8
# Minimum number of candidates of the first rung.
_FEWEST = 8
# Number of opponents of the best in a race, and of rounds.
_RUNNERS, _ROUNDS = 5, 5
# Number of configurations that are tried to confirm before the search gives up.
_CONFIRMED = 3
_NO_TIME = "the budget was spent before it was measured"
_UNTIMED = Failed(reason="the budget was spent before the session was timed")


@dataclass(frozen=True, kw_only=True)
class Probes:
    """Results of timing sessions without a server.

    Attributes:
        sessions: Session keys -> times or failure.
        viable: Candidates that may meet the target, simplest first.
        refused: The other candidates, with reasons.
    """

    sessions: Mapping[Candidate, SessionTiming | Failed]
    viable: tuple[Candidate, ...] = ()
    refused: tuple[Exclusion, ...] = ()

    def timing(self, candidate: Candidate) -> SessionTiming:
        """Return the times of a viable candidate's session.

        Raises:
            KeyError: The candidate is not viable.
        """
        found = self.sessions[session_of(candidate)]
        if isinstance(found, Failed):
            raise KeyError(found.reason)
        return found


def session_of(candidate: Candidate) -> Candidate:
    """Return the part of a candidate that a session without a server depends on."""
    return candidate.restricted_to(SESSION_KEYS)


def probe(space: Space, target: Target, trials: Trials, has_time: Callable[[], bool] = lambda: True) -> Probes:
    """Time each distinct session of the candidates once; at least that of the simplest candidate."""
    sessions: dict[Candidate, SessionTiming | Failed] = {}
    for session in dict.fromkeys(map(session_of, space.candidates)):
        sessions[session] = trials.probe(session) if not sessions or has_time() else _UNTIMED
    viable, refused = [], []
    for candidate in space.candidates:
        reason = objection(candidate, sessions[session_of(candidate)], target)
        if reason:
            refused.append(Exclusion(candidate=candidate, reason=reason, by_budget=reason == _UNTIMED.reason))
        else:
            viable.append(candidate)
    return Probes(sessions=sessions, viable=tuple(viable), refused=tuple(refused))


def shortlist(probes: Probes, most: int, first: Sequence[Candidate] = ()) -> list[Candidate]:
    """Select `most` candidates evenly from all sessions, beginning with the fastest sessions."""
    by_session: dict[Candidate, list[Candidate]] = {}
    for candidate in sorted(probes.viable, key=lambda each: -bound_of(each, probes.timing(each)).rate):
        by_session.setdefault(session_of(candidate), []).append(candidate)
    turns = zip_longest(*(_spread(each) for each in by_session.values()))
    ordered = [candidate for turn in turns for candidate in turn if candidate is not None]
    return list(dict.fromkeys([*first, *ordered]))[: max(most, len(first))]


def _spread(candidates: list[Candidate]) -> list[Candidate]:
    """Reorder candidates so that every prefix is spread evenly: ends first, then middles."""
    order: list[int] = []
    step = len(candidates)
    while step:
        order += range(0, len(candidates), step)
        step //= 2
    return [candidates[each] for each in dict.fromkeys([*order, *range(len(candidates))])]


class Search:
    """One search.

    Args:
        space: Candidates.
        target: Required p99, rate and objective.
        trials: Performs measurements, with a journal.
        budget_s: Seconds for measurements, including those of earlier runs of the same command.
        cores: Number of cores, to describe bottlenecks.
        seed: Seed of the arrivals.
    """

    def __init__(
        self, space: Space, target: Target, trials: RecordedTrials, *, budget_s: float, cores: int, seed: int = 0
    ) -> None:
        self._space, self._target, self._trials = space, target, trials
        self._cores = cores
        self._budget = trials.budget
        self._budget.total_s = budget_s
        self._reading_s = min(3.0, max(1.0, budget_s / 200))
        self._reference = Reference(trials, self._reading_s, seed)
        contest = RateContest if target.objective is Objective.THROUGHPUT else LoadContest
        longest_s = max(budget_s / 15, 4 * self._reading_s)
        self._contest: Contest = contest(self._reference, target, self._reading_s, longest_s)
        self._probes = Probes(sessions={})
        self._scores: dict[Candidate, CandidateScore] = {}
        self._settled: set[Candidate] = set()
        self._winner: Candidate | None = None
        self._notes: list[str] = []

    def run(self) -> Result:
        """Run the search until the best candidate is confirmed or the budget is spent."""
        self._probes = probe(
            self._space,
            self._target,
            self._trials,
            lambda: self._budget.spent_s + self._budget.probe_s <= _PROBING * self._budget.total_s,
        )
        for candidate, reason in self._reference.begin(self._probes.viable[:_FEWEST]).items():
            self._store(self._enter(candidate).out(reason))
        self._halve_successively()
        self._settle([each for each in self._by_score() if not each.lost])
        self._settle_nearest()
        self._climb_to_neighbors()
        self._race_near_ties()
        self._settle_default()
        chosen, promise = self._confirm()
        curve: tuple[Point, ...] = ()
        if chosen and promise and self._target.objective is Objective.THROUGHPUT:
            curve, failure = sweep(self._trials, chosen.candidate, promise, self._reading_s * 2)
            self._notes += [failure] if failure else []
        return self._result(chosen, promise, curve)

    def _has_time(self, share: float) -> bool:
        return self._budget.spent_s < share * self._budget.total_s and self._budget.searching_s > 0

    def _enter(self, candidate: Candidate) -> CandidateScore:
        return self._contest.enter(candidate, bound_of(candidate, self._probes.timing(candidate)).rate)

    def _store(self, scored: CandidateScore) -> None:
        self._scores[scored.candidate] = scored

    def _reached(self) -> float:
        """Return the best reached score."""
        return max((each.score.lower for each in self._scores.values()), default=-math.inf)

    def _by_score(self) -> list[CandidateScore]:
        """Return all scores: remaining candidates first, then measured ones, then those without a server start."""

        def rank(each: CandidateScore) -> tuple[bool, int, float, float]:
            distance = 0 if each.points else 1 if each.candidate == self._reference.candidate else 2
            return bool(each.lost), distance, -each.score.lower, -each.score.value

        return sorted(self._scores.values(), key=rank)

    # Successive halving.

    def _halve_successively(self) -> None:
        left = [each for each in self._probes.viable if each not in self._scores]
        default = [each for each in left if each == self._space.default]
        begun_s = self._reference.readings[0].spent_s if self._reference.readings else self._trials.spent_s
        each_s = max(begun_s / max(1, self._trials.count), self._reading_s)
        most = max(_FEWEST, int(_FIRST_RUNG * self._budget.total_s / each_s))
        for candidate in shortlist(replace(self._probes, viable=tuple(left)), most, default):
            self._store(self._enter(candidate))
        entered = [each for each in self._scores.values() if not each.lost]
        for number in range(_RUNGS):
            running = [now for each in entered if not (now := self._scores[each.candidate]).lost]
            if not running or (number and len(running) <= FINALISTS) or not self._has_time_to_halve():
                break
            rung_s = self._reading_s * 2**number
            self._run_rung(running, rung_s)
            self._drop_worst([self._scores[each.candidate] for each in running], rung_s)

    def _has_time_to_halve(self) -> bool:
        return self._has_time(_HALVING) and self._budget.searching_s >= self._budget.start_s + self._reading_s

    def _run_rung(self, running: Sequence[CandidateScore], seconds: float) -> None:
        """Measure each candidate once, in chunks between which the machine's speed is checked."""
        for start in range(0, len(running), _CHUNK):
            chunk, reached = running[start : start + _CHUNK], self._reached()
            if self._has_time_to_halve():
                chunk = self._reference.steadily(partial(self._advance_all, chunk, seconds, reached))
            for scored in chunk:
                self._store(scored if scored.points or scored.lost else scored.out(_NO_TIME))

    def _advance_all(self, chunk: Sequence[CandidateScore], seconds: float, reached: float) -> list[CandidateScore]:
        return [self._contest.advance(each, seconds, reached) if self._has_time_to_halve() else each for each in chunk]

    def _drop_worst(self, rung: Sequence[CandidateScore], seconds: float) -> None:
        """Eliminate candidates that cannot reach the best or rank below the best third, but not today's."""
        reached = max(each.score.lower for each in rung)
        for each in rung:
            if not each.lost and each.score.upper < reached:
                upper, best = self._contest.describe(each.score.upper), self._contest.describe(reached)
                self._store(each.out(f"at most {upper}, but another one reached {best}"))
        running = [now for each in rung if not (now := self._scores[each.candidate]).lost]
        running.sort(key=lambda each: -each.score.value)
        kept = max(FINALISTS, math.ceil(len(running) / _KEPT))
        for place, each in enumerate(running[kept:], kept + 1):
            if each.candidate != self._space.default:
                self._store(each.out(f"ranks {place} of {len(running)} after {seconds:g} s"))

    # Exact scores of the best candidates.

    def _settle(self, scores: Sequence[CandidateScore]) -> None:
        """Measure until scores are exact, best first, so that the others are measured only against the best.

        While nothing meets the target, candidates of sessions with fewer failures come first, so that the budget is not
        spent on many configurations of one session that looks fast but fails.
        """
        left = list(scores)
        while left:
            scored = min(left, key=self._failures)
            left.remove(scored)
            reached = self._reached()
            is_late = len(left) + 1 < len(scores) and self._budget.left_s <= 0  # the first one is always tried
            must = not is_late and not any(each.points for each in self._scores.values())
            affords = self._has_time(_SEARCHING) and self._reference.affords(scored.candidate, self._reading_s)
            if scored.score.upper >= reached and (must or affords):
                begun = self._contest.advance(scored, 0.0, reached) if must else scored
                self._store(self._reference.steadily(partial(self._contest.settle, begun, reached)))
                self._settled.add(scored.candidate)

    def _failures(self, scored: CandidateScore) -> int:
        """Count failures of the session while nothing has met the target; today's configuration sorts first."""
        if not self._settled or any(has_reached(each, self._target) for each in self._scores.values()):
            return 0
        if scored.candidate == self._space.default:
            return -1
        own = session_of(scored.candidate)
        return sum(session_of(each) == own for each in self._settled)

    def _settle_nearest(self) -> None:
        """If nothing met the target, settle the nearest candidates to report how close they come."""
        for _ in range(_CONFIRMED):
            left = [each for each in self._scores.values() if each.points and each.candidate not in self._settled]
            if self._best() or not left or not self._has_time(1.0):
                return
            p99_s = {each.candidate: min(point.measured.latency.p99.value for point in each.points) for each in left}
            nearest = min(left, key=lambda each: (self._failures(each), p99_s[each.candidate]))
            self._settle([replace(nearest, lost="")])

    def _climb_to_neighbors(self) -> None:
        """Hill-climb from the best to better neighbors."""
        best, viable = self._best(), set(self._probes.viable)
        while best is not None:
            nearby = [each for each in self._space.neighbors(best.candidate) if each in viable - self._settled]
            self._settle([replace(self._scores.get(each, self._enter(each)), lost="") for each in nearby])
            found = self._best()
            if found is None or found.candidate == best.candidate or not self._has_time(_SEARCHING):
                return
            best = found

    def _settle_default(self) -> None:
        """Settle the default configuration, which the choice is compared with."""
        default = self._scores.get(self._space.default)
        if default is not None and default.points and self._has_time(_SEARCHING):
            settled = self._contest.settle(replace(default, lost=""), -math.inf)
            self._store(replace(settled, lost=settled.lost or default.lost))

    def _best(self) -> CandidateScore | None:
        """Return the winner of the race, otherwise the simplest candidate without a significantly better one."""
        raced = self._scores[self._winner] if self._winner else None
        if raced and not raced.lost:
            return raced
        running = [each for each in self._scores.values() if not each.lost]
        best = max(running, key=lambda each: each.score.lower, default=None)
        if best is None or not has_reached(best, self._target):
            return None
        ties = [each for each in running if each is best or self._contest.is_tie(each, best)]
        return min(ties, key=lambda each: self._space.simplicity(each.candidate))

    # The scores of near-ties depend on their arrivals and on the state of the machine at the time. A race measures all
    # of them with the same load and the same new arrivals in each round, and compares pairs of the same round, so that
    # these influences cancel out.

    def _race_near_ties(self) -> None:
        """Race the best against near-ties until they differ significantly."""
        best = self._best()
        if best is None or not self._contest.race_by:
            return
        if self._contest.defends_today:
            self._settle_default()
        measured = [each for each in self._by_score() if each.points]
        # today's configuration takes part if it met the target: noise may have made it look worse
        today = [
            each
            for each in measured
            if self._contest.defends_today and each.candidate == self._space.today and has_reached(each, self._target)
        ]
        near = [each for each in measured if not each.lost or each.candidate in self._settled]
        near = sorted((each for each in near if self._contest.may_race(each, best)), key=lambda each: -each.score.value)
        runners = list({each.candidate: each for each in (best, *[*today, *near][:_RUNNERS])}.values())
        self._race(runners, best)

    def _race(self, runners: list[CandidateScore], best: CandidateScore) -> None:
        """Race candidates, and store the winner and why the others lost.

        Nothing changes if there are fewer than two runners or no time for the minimum number of rounds.
        """
        contest = self._contest
        load, seconds = contest.race_load(best)
        most_s = contest.fewest_rounds * (self._budget.start_s + seconds)
        runners = runners[: int(min(_RUNNERS + 1, max(0.0, self._budget.searching_s / most_s)))]
        if len(runners) < 2:
            return
        running = list(runners)
        costs: dict[Candidate, list[float]] = {each.candidate: [] for each in runners}
        failures: dict[Candidate, str] = {}
        for number in range(1, _ROUNDS + 1):
            outcomes = self._run_round(running, load, seconds, number)
            if len(outcomes) < len(running):
                break  # incomplete rounds do not count
            for candidate, outcome in outcomes.items():
                if isinstance(outcome, Failed):
                    failures[candidate] = outcome.reason
                cost = math.inf if isinstance(outcome, Failed) else contest.race_cost(outcome)
                costs[candidate].append(math.log(cost))
            lead = min((costs[candidate] for candidate in outcomes), key=statistics.fmean)
            running = [each for each in running if not self._is_significantly_worse(costs[each.candidate], lead)]
            if len(running) == 1:
                break
        if len(costs[running[0].candidate]) < contest.fewest_rounds and len(running) > 1:
            return
        winner = min(running, key=lambda each: self._space.simplicity(each.candidate))
        for each in runners:
            if each is not winner:
                lost = failures.get(each.candidate) or self._race_loss(costs[each.candidate], costs[winner.candidate])
                self._store(each.out(lost))
        self._store(replace(winner, lost="", score=contest.race_score(winner, load)))
        self._winner = winner.candidate

    def _run_round(
        self, running: Sequence[CandidateScore], load: LoadShape, seconds: float, number: int
    ) -> dict[Candidate, Measured | Failed]:
        """Measure each candidate once with the arrivals of a round; fewer if the time is up."""
        outcomes = {}
        for candidate in (each.candidate for each in running):
            if not (self._has_time(_RACING) and self._reference.affords(candidate, seconds)):
                break
            outcomes[candidate] = self._reference.measure(candidate, load, seconds, number)
        return outcomes

    def _is_significantly_worse(self, costs: Sequence[float], lead: Sequence[float]) -> bool:
        """Return true if costs are significantly above the leader's."""
        if not all(map(math.isfinite, costs)):
            return costs is not lead
        if len(costs) < self._contest.fewest_rounds:
            return False
        differences = [own - other for own, other in zip(costs, lead, strict=True)]
        spread = max(statistics.stdev(differences), self._contest.least_spread)
        error = spread / math.sqrt(len(differences))
        return statistics.fmean(differences) > self._contest.race_errors(len(differences)) * error

    def _race_loss(self, costs: Sequence[float], winner: Sequence[float]) -> str:
        if not all(map(math.isfinite, costs)):
            return "more than 1 in 100 requests failed in the race of near-ties"
        rounds = winner[: len(costs)]
        ratio = math.exp(statistics.fmean(costs) - statistics.fmean(rounds))
        words = f"near-tie, raced for {len(costs)} rounds: {ratio:.2f} times the {self._contest.race_by}"
        is_worse = self._is_significantly_worse(costs, rounds)
        return words if is_worse else f"{words}, no significant difference, but the chosen one is simpler"

    # The promise, and the result.

    def _confirm(self) -> tuple[CandidateScore | None, Point | None]:
        """Return the best candidate that is confirmed by another measurement, with that measurement."""
        for number in range(_CONFIRMED):
            best = self._best() or self._likeliest()
            if best is None or (number and self._budget.left_s < self._budget.start_s + self._reading_s):
                break
            promise, reason = confirm(self._trials, best, self._target, self._reference.level)
            if promise:
                if not has_reached(self._scores[best.candidate], self._target):
                    best = replace(best, score=self._contest.race_score(best, promise.load))
                    self._store(best)
                self._notes += (
                    [f"the promise was confirmed at the second attempt; at the first, {reason}"] if reason else []
                )
                return best, promise
            self._store(self._scores[best.candidate].out(reason))
        return None, None

    def _likeliest(self) -> CandidateScore | None:
        """Return the best candidate that may meet the target, where the budget ended the search before one did.

        Its score is what its measurements suggest. None if the rest of the budget is too short to confirm it.
        """
        if self._budget.left_s < self._budget.start_s + _SHORTEST_S:
            return None
        running = [each for each in self._scores.values() if each.points and not each.lost]
        best = max(running, key=lambda each: each.score.value, default=None)
        if best is None or not math.isfinite(best.score.value):
            return None
        return replace(best, score=replace(best.score, lower=best.score.value))

    def _result(self, chosen: CandidateScore | None, promise: Point | None, curve: tuple[Point, ...]) -> Result:
        rows = {each.candidate: self._row(each, chosen) for each in self._by_score() if each.points}
        untried = [self._unmeasured(each) for each in self._probes.viable if each not in rows]
        listed = tuple(rows.values())
        return Result(
            target=self._target,
            chosen=rows.get(chosen.candidate) if chosen else None,
            promise=promise,
            closest=None if chosen else closest_row(listed, self._target),
            default=rows.get(self._space.today),
            rows=listed,
            front=pareto_front(listed, self._target),
            exclusions=(*self._space.exclusions, *self._probes.refused, *untried),
            curve=curve,
            knee=knee(curve),
            readings=tuple(self._reference.readings),
            notes=(*self._reference.notes, *self._notes, *self._budget_notes(chosen), *self._bound_notes()),
            spent_s=self._trials.spent_s,
            measurements=self._trials.count,
        )

    def _row(self, scored: CandidateScore, chosen: CandidateScore | None) -> Row:
        timing = self._probes.timing(scored.candidate)
        if chosen and scored.candidate != chosen.candidate and not scored.lost:
            scored = scored.out(self._reason_for_loss(scored, chosen))
        is_met = has_reached(scored, self._target)
        words = self._contest.describe(scored.score.lower if is_met else scored.score.value)
        return Row(
            scored=scored,
            score=words if is_met else f"{words}; no load met the target",
            limit=limit_of(scored, timing, self._target, self._cores),
            accuracy_lost=timing.accuracy_lost,
        )

    def _reason_for_loss(self, scored: CandidateScore, chosen: CandidateScore) -> str:
        simplicity = self._space.simplicity
        if self._contest.is_tie(scored, chosen) and simplicity(chosen.candidate) < simplicity(scored.candidate):
            return "no significant difference, but the chosen one is simpler"
        best = self._contest.describe(chosen.score.lower)
        if scored.candidate not in self._settled:
            return "the budget was spent before it was compared with the chosen one"
        if not has_reached(scored, self._target):
            return f"missed the target at the load of the chosen one: {best}"
        return f"{self._contest.describe(scored.score.lower)}, the chosen one {best}"

    def _unmeasured(self, candidate: Candidate) -> Exclusion:
        scored = self._scores.get(candidate)
        lost = scored.lost if scored else ""
        reason = lost or "not measured: the budget was spent on more promising candidates"
        return Exclusion(candidate=candidate, reason=reason, by_budget=lost in ("", _NO_TIME))

    def _bound_notes(self) -> list[str]:
        """Describe the best bounds if the sessions' times rule out every candidate."""
        sessions = self._probes.sessions
        timed = {
            each: timing
            for each, timing in sessions.items()
            if isinstance(timing, SessionTiming) and not timing.accuracy
        }
        if self._probes.viable or not timed:
            return []
        run_s = {each: min(timing.batch_s.values()) for each, timing in timed.items()}
        fastest = min(run_s, key=lambda each: run_s[each])
        notes = [f"the fastest session without a server takes {run_s[fastest] * 1e3:.3g} ms: {fastest}"]
        if self._target.rate:
            candidates = [each for each in self._space.candidates if session_of(each) in timed]
            rates = {each: bound_of(each, timed[session_of(each)]).rate for each in candidates}
            best = max(rates, key=lambda each: rates[each])
            notes.append(f"sessions without a server reach at most {rates[best]:.3g} requests per second: {best}")
        return notes

    def _budget_notes(self, chosen: CandidateScore | None) -> list[str]:
        """Describe the effects of a short budget."""
        notes, budget = [], self._budget
        if budget.left_s < -0.5:
            notes.append(f"the budget of {budget.total_s:.0f} s was overrun by {-budget.left_s:.0f} s")
        is_over = not self._has_time(_SEARCHING) or budget.searching_s < budget.start_s + self._reading_s
        if chosen is None and self._probes.viable and is_over:
            each_s = budget.start_s + self._reading_s
            needed_s = max(2 * budget.total_s, min(_FEWEST, len(self._probes.viable)) * each_s / _HALVING)
            notes.append(
                f"{budget.spent_s:.0f} of {budget.total_s:.0f} s were spent, and no configuration was confirmed; each "
                f"start of one takes {budget.start_s:.0f} s: a larger --budget continues the search, at least "
                f"{math.ceil(needed_s / 60)}m"
            )
        return notes
