"""The search: from a space and a target to the configuration that was proven to meet it.

1. Bare sessions rule out what no scheduler can save (`probe`).
2. Successive halving with a short measurement of each of the others, or of as many as the budget allows (`Ladder`).
3. The finalists are measured until their scores are exact; then the neighbors of the best, which halving may have
   missed, for as long as one of them is better.
4. Of those that do not differ significantly, the simplest is chosen, and measured once more: the promise.

No surrogate model drives it: bounds and dominance decide most points with one measurement, each measurement is exact
about one candidate, and every rejection has a reason that can be read. The search is a function of the outcomes: where
they come from a journal, it goes on where it was.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import zip_longest

from graphkiln.tuning.candidate import QUEUE_DELAY_US, SESSION_KEYS, Candidate
from graphkiln.tuning.contest import LoadContest, RateContest
from graphkiln.tuning.drift import Reference
from graphkiln.tuning.journal import Budget, RecordedTrials
from graphkiln.tuning.result import CandidateScore, Contest, Point, Race, Result, Row, knee, pareto_front
from graphkiln.tuning.space import Exclusion, Space, bound_of, objection
from graphkiln.tuning.statistics import requests_needed
from graphkiln.tuning.target import Objective, Target
from graphkiln.tuning.trials import Bare, ClosedLoop, Failed, LoadShape, Measured, OpenLoop, Trials

# Bare sessions: rule out candidates that cannot meet the target, and select as many as the budget allows.


@dataclass(frozen=True, kw_only=True)
class Probes:
    """Results of bare sessions.

    Attributes:
        sessions: Session -> its times, or why it has none.
        viable: Candidates that may meet the target, the simplest first.
        refused: The others, with the reasons.
    """

    sessions: Mapping[Candidate, Bare | Failed]
    viable: tuple[Candidate, ...] = ()
    refused: tuple[Exclusion, ...] = field(default=())

    def bare(self, candidate: Candidate) -> Bare:
        """The times of a viable candidate's session.

        Raises:
            KeyError: It is not viable.
        """
        found = self.sessions[candidate.restricted_to(SESSION_KEYS)]
        if isinstance(found, Failed):
            raise KeyError(found.reason)
        return found


def probe(space: Space, target: Target, trials: Trials, has_time: Callable[[], bool] = lambda: True) -> Probes:
    """Measure the bare session of every candidate, each session once.

    Args:
        space: The candidates.
        target: What they must meet.
        trials: What measures.
        has_time: Returns true while the budget allows another session; the simplest one is timed anyway.
    """
    by_session = dict.fromkeys(each.restricted_to(SESSION_KEYS) for each in space.candidates)
    sessions: dict[Candidate, Bare | Failed] = {}
    for session in by_session:
        sessions[session] = trials.probe(session) if not sessions or has_time() else _UNTIMED
    viable, refused = [], []
    for candidate in space.candidates:
        reason = objection(candidate, sessions[candidate.restricted_to(SESSION_KEYS)], target)
        if reason:
            refused.append(Exclusion(candidate=candidate, reason=reason, by_budget=reason == _UNTIMED.reason))
        else:
            viable.append(candidate)
    return Probes(sessions=sessions, viable=tuple(viable), refused=tuple(refused))


_UNTIMED = Failed(reason="the budget was spent before its session was timed")


def shortlist(probes: Probes, most: int, first: Sequence[Candidate] = ()) -> list[Candidate]:
    """Select `most` candidates, spread over all sessions, those of the fastest sessions first.

    Args:
        probes: Results of bare sessions.
        most: How many.
        first: Those that are taken anyway.
    """
    by_session: dict[Candidate, list[Candidate]] = {}
    for candidate in sorted(probes.viable, key=lambda each: -bound_of(each, probes.bare(each)).rate):
        by_session.setdefault(candidate.restricted_to(SESSION_KEYS), []).append(candidate)
    turns = zip_longest(*(_spread(each) for each in by_session.values()))
    ordered = [candidate for turn in turns for candidate in turn if candidate is not None]
    return list(dict.fromkeys([*first, *ordered]))[: max(most, len(first))]


def _spread(candidates: list[Candidate]) -> list[Candidate]:
    """Reorder candidates so that every prefix is spread over the whole: ends first, then middles."""
    order: list[int] = []
    step = len(candidates)
    while step:
        order += range(0, len(candidates), step)
        step //= 2
    return [candidates[each] for each in dict.fromkeys([*order, *range(len(candidates))])]


# Successive halving: short measurements of many candidates, longer ones of those that are left.
#
# A candidate leaves for one of two reasons, which its score keeps: what it can still reach is below what another
# proved (that is final), or it ranks below the best third of a rung (a guess: the search looks again around the best).
#
# Source: K. Jamieson, A. Talwalkar, "Non-stochastic Best Arm Identification and Hyperparameter Optimization" (2016).

FINALISTS = 4
RUNGS = 6
# Reason of a candidate that was not measured.
NO_TIME = "the budget was spent before it was measured"
# One of so many candidates of a rung goes on to the next.
_KEPT = 3
# Candidates between two looks at the machine's speed.
_CHUNK = 8


class Ladder:
    """Successive halving of the candidates.

    Args:
        contest: What they are compared by.
        reference: Watches the machine.
        has_time: Returns true while the budget allows to go on.
        keep: Candidates that leave only when they are significantly worse.
    """

    def __init__(
        self, contest: Contest, reference: Reference, has_time: Callable[[], bool], keep: Sequence[Candidate] = ()
    ) -> None:
        self._contest, self._reference, self._has_time, self._keep = contest, reference, has_time, frozenset(keep)

    def climb(self, entered: Sequence[CandidateScore], seconds: float) -> list[CandidateScore]:
        """Measure candidates until at most `FINALISTS` are in the contest, or the time is up.

        Args:
            entered: Initial scores.
            seconds: Of the first rung's measurements; each next rung's are twice as long.

        Returns:
            All of them, those that are in the contest first, the best of them first.
        """
        scores = list(entered)
        for number in range(RUNGS):
            running = [each for each in scores if not each.lost]
            is_first = number == 0  # there are no scores before that
            if (len(running) <= FINALISTS and not is_first) or not self._has_time():
                break
            rung_s = seconds * 2**number
            climbed = self._halve(self._rung(running, rung_s), rung_s)
            scores = [*climbed, *(each for each in scores if each.lost)]
        return sorted(scores, key=lambda each: (bool(each.lost), -each.score.value))

    def _rung(self, running: Sequence[CandidateScore], seconds: float) -> list[CandidateScore]:
        done: list[CandidateScore] = []
        for start in range(0, len(running), _CHUNK):
            chunk = running[start : start + _CHUNK]
            if not self._has_time():
                return [*done, *(each if each.points else each.out(NO_TIME) for each in running[start:])]
            reached = best_reached([*done, *running])
            done += self._reference.steadily(partial(self._advance_all, chunk, seconds, reached))
        return done

    def _advance_all(self, chunk: Sequence[CandidateScore], seconds: float, reached: float) -> list[CandidateScore]:
        return [self._advance(each, seconds, reached) for each in chunk]

    def _advance(self, scored: CandidateScore, seconds: float, reached: float) -> CandidateScore:
        if self._has_time():
            return self._contest.advance(scored, seconds, reached)
        return scored if scored.points else scored.out(NO_TIME)

    def _halve(self, rung: Sequence[CandidateScore], seconds: float) -> list[CandidateScore]:
        reached = best_reached(rung)
        judged = [each if each.lost else each.out(self._beaten(each, reached)) for each in rung]
        running = sorted((each for each in judged if not each.lost), key=lambda each: -each.score.value)
        kept = max(FINALISTS, math.ceil(len(running) / _KEPT))
        left = [
            each.out(f"ranks {place} of {len(running)} after {seconds:g} s")
            for place, each in enumerate(running, 1)
            if place > kept and each.candidate not in self._keep
        ]
        gone = {each.candidate for each in left}
        return [
            *(each for each in running if each.candidate not in gone),
            *left,
            *(each for each in judged if each.lost),
        ]

    def _beaten(self, scored: CandidateScore, reached: float) -> str:
        if scored.score.upper >= reached:
            return ""
        return (
            f"{self._contest.describe(scored.score.upper)} at best, where another has {self._contest.describe(reached)}"
        )


def best_reached(scores: Sequence[CandidateScore]) -> float:
    """The best score that was reached; minus infinity where there are no scores."""
    return max((each.score.lower for each in scores), default=-math.inf)


# The last measurement of what was chosen: other arrivals, longer, and the machine as it is.

_SEED = 77_000_000
# Measurements at most, and into how many the budget that is left is divided.
_TRIES, _SLICES = 8, 5
# Factors on a rate: before the last measurement that fits, after one whose p99 missed the target, and after one
# whose bound alone missed it.
_LARGE_STEP, _STEP, _SMALL_STEP = 0.75, 0.9, 0.93
# Requests that may exceed the bound: as many make it tight, and leave enough where they wait for each other; with fewer
# than the few a bound is seldom found, however far below the target p99 is.
_SLOWER, _FEW_SLOWER = 100, 5
# The same where several requests say as much as an independent one, counted in those; and how many requests of a
# measurement tell how many these are.
_CERTAIN, _COUNTED = 1, 100
_SHORTEST_S = 5.0
# Duration of the second measurement of a load that did not hold, as a multiple of the first.
_LONGER = 2
# Shares of the promised rate at which latency is measured, beside the rate itself.
_CURVE = (0.25, 0.5, 0.7, 0.85, 1.1)


def confirm(trials: RecordedTrials, scored: CandidateScore, target: Target, level: float) -> tuple[Point | None, str]:
    """Measure a candidate under the load that is to be promised; lower a free rate until it holds.

    Args:
        trials: What measures, within its budget; one measurement is made whatever that says.
        scored: Score of the candidate from the search.
        target: What must be met.
        level: Speed of the machine now, as a share of that of the scores.

    Returns:
        The load that held with what was measured, and how the same load did not hold before, if so; or None and the
        reason.
    """
    is_free = target.objective is Objective.THROUGHPUT
    rate = scored.score.lower * min(level, 1.0) if is_free else target.rate
    budget, candidate = trials.budget, scored.candidate
    reason, slice_s = "its figures were not measured again", (budget.left_s - budget.start_s) / _SLICES
    inflation, doubt = _inflation_of(scored, target.p99_s), ""
    for number in range(_TRIES):
        if number and budget.left_s < budget.needed_s(candidate, _SHORTEST_S):
            return None, f"{reason}, and the budget is spent"
        if rate and is_free and not _fits_twice(budget, candidate, _enough_s(slice_s, rate, inflation)):
            rate *= _LARGE_STEP  # the last one that fits: rather a lower promise than none
        load: LoadShape = OpenLoop(float(f"{rate:.4g}")) if rate else ClosedLoop(1)
        per_s = _requests_per_s(load, scored)
        seconds = _seconds(budget, candidate, per_s, _enough_s(slice_s, per_s, inflation) * (_LONGER if doubt else 1))
        outcome = trials.measure(candidate, load, round(seconds, 3), _SEED + number)
        if isinstance(outcome, Failed):
            return None, outcome.reason
        p99 = outcome.latency.p99
        if outcome.latency.p99_at_most_s <= target.p99_s and outcome.keeps_up:
            return Point(load=load, measured=outcome), doubt
        reason = _missed(outcome, target.p99_s)
        if p99.value <= target.p99_s:
            inflation = outcome.latency.inflation  # that of a growing queue means nothing
        if rate and is_free:
            rate *= _STEP if p99.value > target.p99_s else _SMALL_STEP
        elif p99.value > target.p99_s or not outcome.keeps_up:
            if doubt:
                break
            doubt = reason  # once, it may have been the machine that stood still
    return None, reason


def sweep(
    trials: RecordedTrials, candidate: Candidate, promise: Point, seconds: float
) -> tuple[tuple[Point, ...], str]:
    """Latency against rate, around the rate that was promised; as many points as the time allows.

    Returns:
        The points by rate, and how the candidate failed at another one; empty where it did not.
    """
    if not isinstance(promise.load, OpenLoop):
        return (), ""
    points, failure = [promise], ""
    for share in _CURVE:
        if trials.budget.left_s < 1.5 * trials.budget.needed_s(candidate, seconds):
            break
        load = OpenLoop(float(f"{promise.load.rate * share:.4g}"))
        outcome = trials.measure(candidate, load, seconds, _SEED - 1)
        if isinstance(outcome, Failed):
            failure = f"beside the promise, at {load.rate:g} requests per second, it failed: {outcome.reason}"
            break
        points.append(Point(load=load, measured=outcome))
    return tuple(sorted(points, key=lambda each: each.load.rate if isinstance(each.load, OpenLoop) else 0.0)), failure


def _missed(measured: Measured, p99_s: float) -> str:
    """Explain why a measurement is no proof: too slow, too short for the bound, or a growing queue."""
    latency = measured.latency
    p99_ms = latency.p99.value * 1e3
    if latency.p99.value > p99_s:
        return f"its p99 did not hold when it was measured again: {p99_ms:.3g} ms"
    if not measured.keeps_up:
        reached = f"{measured.throughput.value:.3g} of {measured.due_per_s:.3g}"
        return f"measured again, {reached} requests per second were answered: their queue grows"
    return f"measured again, its p99 was {p99_ms:.3g} ms in {latency.count} requests: too few to be sure of the target"


def _inflation_of(scored: CandidateScore, p99_s: float) -> float:
    """Number of requests that carry the information of one, in points that met the target; 1 if unknown."""
    latencies = [point.measured.latency for point in scored.points if isinstance(point.load, OpenLoop)]
    within = [each for each in latencies if each.p99.value <= p99_s and each.count >= _COUNTED]
    return statistics.median(each.inflation for each in within) if within else 1.0


def _enough_s(slice_s: float, requests_per_s: float, inflation: float) -> float:
    """Duration of a slice of the budget, or longer if a bound takes more requests."""
    requests = max(requests_needed(_FEW_SLOWER), inflation * requests_needed(_CERTAIN))
    return max(slice_s, requests / requests_per_s)


def _fits_twice(budget: Budget, candidate: Candidate, seconds: float) -> bool:
    return budget.left_s >= 2 * budget.needed_s(candidate, seconds)


def _seconds(budget: Budget, candidate: Candidate, requests_per_s: float, enough_s: float) -> float:
    """Duration of a measurement: no longer than a tight bound takes, or than the budget allows."""
    fits_s = budget.left_s - budget.needed_s(candidate, 0.0)
    return max(_SHORTEST_S, min(_seconds_for(_SLOWER, requests_per_s), enough_s, fits_s))


def _seconds_for(slower: int, requests_per_s: float) -> float:
    return requests_needed(slower) / requests_per_s


def _requests_per_s(load: LoadShape, scored: CandidateScore) -> float:
    if isinstance(load, OpenLoop):
        return load.rate
    reached = scored.points[-1].measured.throughput.value if scored.points else 1.0
    return max(reached, 1e-3)


# Rows of the result: what each candidate reached, what limits it (the model, the queue, the batcher, the cores), and
# why it was not chosen.

# Share of the p99 that makes a part the limit.
_MUCH = 0.5


def limit_of(scored: CandidateScore, bare: Bare, target: Target, cores: int) -> str:
    """Describe what limits a candidate.

    Args:
        scored: Its score, with its points.
        bare: Its session.
        target: What it was to meet.
        cores: Of the machine.
    """
    point = _hardest(scored, target)
    if point is None:
        return scored.lost
    measured, run_s = point.measured, min(bare.batch_s.values())
    if measured.errors:
        kind, count = max(measured.errors.items(), key=lambda each: each[1])
        return f"errors: {count} requests ended with {kind}"
    if isinstance(point.load, OpenLoop) and not measured.keeps_up:
        return f"throughput: {measured.throughput.value:.3g} of {point.load.rate:.3g} requests per second are answered"
    return _slowest_part(scored.candidate, measured, run_s, cores)


def _slowest_part(candidate: Candidate, measured: Measured, run_s: float, cores: int) -> str:
    """Describe what the slowest requests wait for."""
    p99_s, delay_s = measured.latency.p99.value, max(0, candidate.number(QUEUE_DELAY_US, 0)) * 1e-6
    if run_s > _MUCH * p99_s:
        return f"the model: a run of one sample takes {run_s * 1e3:.3g} of {p99_s * 1e3:.3g} ms"
    if delay_s > _MUCH * p99_s:
        return f"the batcher: it waits up to {delay_s * 1e3:.3g} of {p99_s * 1e3:.3g} ms for more requests"
    if measured.server_cores is not None and measured.server_cores > 0.9 * (cores - measured.client_cores):
        return f"the cores: the server keeps {measured.server_cores:.2g} of {cores} busy"
    if measured.latency.p50_s < p99_s / 3:
        return f"the queue: half of the requests take {measured.latency.p50_s * 1e3:.3g} ms, the slowest wait"
    return f"a run under load takes {measured.latency.p50_s * 1e3:.3g} ms, alone {run_s * 1e3:.3g} ms"


def _hardest(scored: CandidateScore, target: Target) -> Point | None:
    """The point that shows the limit: the lowest rate that missed the target, or else the last one.

    Where every load missed it, the one that came closest.
    """
    if scored.points and all(each.measured.latency.p99.value > target.p99_s for each in scored.points):
        return min(scored.points, key=lambda each: each.measured.latency.p99.value)
    missed = [
        each
        for each in scored.points
        if isinstance(each.load, OpenLoop) and each.measured.latency.p99_at_most_s > target.p99_s
    ]
    rates = {each.load.rate: each for each in missed if isinstance(each.load, OpenLoop)}
    return rates[min(rates)] if rates else (scored.points[-1] if scored.points else None)


def has_reached(scored: CandidateScore, target: Target) -> bool:
    """Return true if a candidate met the target under some load."""
    lower = scored.score.lower
    return math.isfinite(lower) and (lower > 0 or target.objective is not Objective.THROUGHPUT)


@dataclass(frozen=True, kw_only=True)
class Conclusion:
    """Explanation of a finished search.

    Attributes:
        space: What could be chosen.
        target: What was to be met.
        contest: What candidates were compared by.
        probes: Results of bare sessions.
        settled: Those whose scores are as exact as they get.
        chosen: What was chosen; None for nothing.
        cores: Of the machine.
    """

    space: Space
    target: Target
    contest: Contest
    probes: Probes
    settled: Collection[Candidate]
    chosen: CandidateScore | None
    cores: int

    def row(self, scored: CandidateScore) -> Row:
        """A candidate that was measured."""
        bare, chosen = self.probes.bare(scored.candidate), self.chosen
        if chosen and scored.candidate != chosen.candidate and not scored.lost:
            scored = scored.out(self._why_not(scored, chosen))
        is_met = has_reached(scored, self.target)
        words = self.contest.describe(scored.score.lower if is_met else scored.score.value)
        limit = limit_of(scored, bare, self.target, self.cores)
        score = words if is_met else f"{words}; no load met the target"
        return Row(scored=scored, score=score, limit=limit, accuracy_lost=bare.accuracy_lost)

    def closest(self, rows: Sequence[Row]) -> Row | None:
        """Row to report if nothing was proven: the best unproven one that met the target, else the lowest p99."""
        met = [row for row in rows if has_reached(row.scored, self.target)]
        measured = [row for row in rows if row.best_point]
        lowest = min(measured, key=lambda row: row.best_point.measured.latency.p99.value, default=None)  # type: ignore[union-attr]
        return max(met, key=lambda row: row.scored.score.lower) if met else lowest

    def _why_not(self, scored: CandidateScore, chosen: CandidateScore) -> str:
        if self.contest.is_tie(scored, chosen) and self._is_simpler(chosen, scored):
            return "no significant difference from the chosen one, which is simpler"
        best = self.contest.describe(chosen.score.lower)
        if scored.candidate not in self.settled:
            return "the budget was spent before it was compared with the chosen one"
        if not has_reached(scored, self.target):
            return f"did not meet the target at the load of the chosen one: {best}"
        return f"{self.contest.describe(scored.score.lower)}, the chosen one {best}"

    def _is_simpler(self, one: CandidateScore, other: CandidateScore) -> bool:
        return self.space.simplicity(one.candidate) < self.space.simplicity(other.candidate)


def unmeasured(candidate: Candidate, scored: CandidateScore | None) -> Exclusion:
    """A candidate that has no row.

    Args:
        candidate: Which.
        scored: Its score; None where it never took part.
    """
    reason = scored.lost if scored else ""
    words = reason or "not measured: the budget went to more promising ones"
    return Exclusion(candidate=candidate, reason=words, by_budget=reason in ("", NO_TIME))


def bound_notes(space: Space, probes: Probes, target: Target) -> list[str]:
    """Describe the fastest and the highest bound if bare sessions rule every candidate out."""
    timed = {each: bare for each, bare in probes.sessions.items() if isinstance(bare, Bare) and not bare.accuracy}
    if probes.viable or not timed:
        return []
    fastest = min(timed, key=lambda each: min(timed[each].batch_s.values()))
    notes = [f"no bare session takes less than {min(timed[fastest].batch_s.values()) * 1e3:.3g} ms: {fastest}"]
    if target.rate:
        rates = {each: bound_of(each, timed[own]).rate for each, own in _sessions(space) if own in timed}
        best = max(rates, key=lambda each: rates[each])
        notes.append(f"no bare sessions reach more than {rates[best]:.3g} requests per second: {best}")
    return notes


def _sessions(space: Space) -> list[tuple[Candidate, Candidate]]:
    return [(each, each.restricted_to(SESSION_KEYS)) for each in space.candidates]


# Near-ties are measured again, with other arrivals, until they differ significantly: a race under one load.
#
# A bracket of rates (`RateContest`) is exact about the arrivals that it was measured with, and a latency
# (`LoadContest`) about its minute; neither is more exact than the machine was steady. Where measurements of the same
# differ by 5%, the better of two may lose. Those that came close to the best get the same load, all with the same new
# arrivals, round after round; who is surely slower leaves. Pairs of the same round are compared, so that what the
# arrivals and the moment do to both cancels out. Of those that are left the simplest wins: what serves today, where
# it is among them.
#
# Source: O. Maron, A. Moore, "Hoeffding Races" (1994); M. Birattari and others, "A Racing Algorithm for Configuring
# Metaheuristics" (2002), with paired differences.

Simplicity = Callable[[Candidate], tuple[int, int, str]]

# Beside the best.
_RUNNERS = 5
_ROUNDS = 5


def rematch(
    near: Sequence[CandidateScore],
    best: CandidateScore,
    reference: Reference,
    has_time: Callable[[], bool],
    race: Race,
    *,
    simplicity: Simplicity,
) -> list[CandidateScore]:
    """Race near-ties until they differ significantly.

    Args:
        near: What came close, those first that are to take part before others.
        best: Takes part in any case.
        reference: Measures.
        has_time: Returns true while the budget allows another measurement.
        race: What they are compared by.
        simplicity: Sort key, the simplest first: decides between those that do not differ significantly.

    Returns:
        Scores of all that took part: the winner's first, the others lost. Empty if there was no candidate to
        compare, or no time for the fewest rounds.
    """
    running = list({each.candidate: each for each in (best, *near[:_RUNNERS])}.values())
    running = running[: _most(reference, race)]
    if len(running) < 2:
        return []
    runners = list(running)
    costs: dict[Candidate, list[float]] = {each.candidate: [] for each in running}
    failures: dict[Candidate, str] = {}

    def measure(candidate: Candidate, number: int) -> float | None:
        """Logarithm of what counts, or None where the time is up."""
        if not (has_time() and reference.affords(candidate, race.seconds)):
            return None
        outcome = reference.measure(candidate, race.load, race.seconds, number)
        if isinstance(outcome, Failed):
            failures[candidate] = outcome.reason
            return math.inf
        return math.log(race.cost(outcome))

    for number in range(1, _ROUNDS + 1):
        found = _round(running, measure, number)
        if len(found) < len(running):
            break
        for candidate, value in found.items():
            costs[candidate].append(value)
        running = _left(running, costs, race)
        if len(running) == 1:
            break
    if len(costs[running[0].candidate]) < race.fewest and len(running) > 1:
        return []
    winner = min(running, key=lambda each: simplicity(each.candidate))
    others = [each for each in runners if each.candidate != winner.candidate]
    lost = [each.out(failures.get(each.candidate) or _reason(each, winner, costs, race)) for each in others]
    return [replace(winner, lost="", score=race.reached(winner)), *lost]


def _most(reference: Reference, race: Race) -> int:
    """Number of candidates that can run the fewest rounds within the budget."""
    budget = reference.trials.budget
    each_s = race.fewest * (budget.start_s + race.seconds)
    return int(min(_RUNNERS + 1, max(0.0, budget.searching_s / each_s)))


def _round(
    running: Sequence[CandidateScore], measure: Callable[[Candidate, int], float | None], number: int
) -> dict[Candidate, float]:
    """Measure each once; returns fewer if the time is up."""
    found = {}
    for each in running:
        cost = measure(each.candidate, number)
        if cost is None:
            break
        found[each.candidate] = cost
    return found


def _left(
    running: Sequence[CandidateScore], costs: Mapping[Candidate, Sequence[float]], race: Race
) -> list[CandidateScore]:
    """Drop candidates that are significantly worse than the leader."""
    lead = min(running, key=lambda each: statistics.fmean(costs[each.candidate]))
    return [each for each in running if not _is_worse(costs[each.candidate], costs[lead.candidate], race)]


def _is_worse(one: Sequence[float], lead: Sequence[float], race: Race) -> bool:
    if not all(map(math.isfinite, one)):
        return one is not lead
    if len(one) < race.fewest:
        return False
    differences = [a - b for a, b in zip(one, lead, strict=True)]
    spread = max(statistics.stdev(differences), race.spread)
    return statistics.fmean(differences) > race.sure(len(differences)) * spread / math.sqrt(len(differences))


def _reason(
    lost: CandidateScore, winner: CandidateScore, costs: Mapping[Candidate, Sequence[float]], race: Race
) -> str:
    own, rounds = costs[lost.candidate], costs[winner.candidate]
    if not all(map(math.isfinite, own)):
        return "more than 1 in 100 of its requests failed when near-ties were measured again"
    ratio = math.exp(statistics.fmean(own) - statistics.fmean(rounds[: len(own)]))
    words = f"a near-tie, measured {len(own)} times more: {ratio:.2f} times the {race.what}"
    differs = _is_worse(own, rounds[: len(own)], race)
    return words if differs else f"{words}, which is no significant difference; the chosen one is simpler"


# Shares of the budget: for bare sessions, for the first rung, after which no rung begins, none but near-ties are
# measured, and nothing but the confirmation.
_PROBING, _FIRST_RUNG, _LADDER, _SEARCHING, _REMATCH = 0.3, 0.25, 0.5, 0.7, 0.75
# Configurations that are measured once more before the search gives up.
_CONFIRMED = 3
# Candidates of the first rung, however short its share is.
_FEWEST = 8


class Search:
    """One search.

    Args:
        space: What may be chosen.
        target: What it must meet.
        trials: What measures, with its journal.
        budget_s: Seconds that measurements may take, those of earlier runs of the same command included.
        cores: Cores of the machine, to describe limits.
        seed: Another number gives other arrivals.
    """

    def __init__(
        self,
        space: Space,
        target: Target,
        trials: RecordedTrials,
        *,
        budget_s: float,
        cores: int,
        seed: int = 0,
    ) -> None:
        self._space, self._target, self._trials = space, target, trials
        self._cores = cores
        self._budget = trials.budget
        self._budget.total_s = budget_s
        self._reading_s = min(3.0, max(1.0, budget_s / 200))
        self._reference = Reference(trials, self._reading_s, seed)
        self._longest_s = longest_s = max(budget_s / 15, 4 * self._reading_s)
        by_rate = target.objective is Objective.THROUGHPUT
        self._contest: Contest = (RateContest if by_rate else LoadContest)(
            self._reference, target, self._reading_s, longest_s
        )
        self._probes = Probes(sessions={})
        self._scores: dict[Candidate, CandidateScore] = {}
        self._settled: set[Candidate] = set()
        self._winner: Candidate | None = None
        self._notes: list[str] = []

    def run(self) -> Result:
        """Search until the best is found, or the budget is spent."""
        self._probes = probe(self._space, self._target, self._trials, self._has_time_to_probe)
        for candidate, reason in self._reference.begin(self._probes.viable[:_FEWEST]).items():
            self._keep(self._enter(candidate).out(reason))
        self._climb()
        self._settle([each for each in self._by_score() if not each.lost])
        self._come_closer()
        self._look_around()
        self._rematch()
        self._settle_default()
        chosen, promise = self._confirm()
        curve: tuple[Point, ...] = ()
        if chosen and promise and self._target.objective is Objective.THROUGHPUT:
            curve, failure = sweep(self._trials, chosen.candidate, promise, self._reading_s * 2)
            self._notes += [failure] if failure else []
        return self._result(chosen, promise, curve)

    def _has_time_to_probe(self) -> bool:
        return self._budget.spent_s + self._budget.probe_s <= _PROBING * self._budget.total_s

    def _has_time(self, share: float) -> bool:
        return self._budget.spent_s < share * self._budget.total_s and self._budget.searching_s > 0

    def _has_time_to_climb(self) -> bool:
        return self._has_time(_LADDER) and self._budget.searching_s >= self._budget.start_s + self._reading_s

    def _climb(self) -> None:
        left = [each for each in self._probes.viable if each not in self._scores]
        default = [each for each in left if each == self._space.default]
        probes = replace(self._probes, viable=tuple(left))
        reading = self._reference.readings[0].spent_s if self._reference.readings else self._trials.spent_s
        each_s = max(reading / max(1, self._trials.count), self._reading_s)
        most = max(_FEWEST, int(_FIRST_RUNG * self._budget.total_s / each_s))
        ladder = Ladder(self._contest, self._reference, self._has_time_to_climb, default)
        entered = [self._enter(each) for each in shortlist(probes, most, default)]
        for scored in ladder.climb(entered, self._reading_s):
            self._keep(scored)

    def _settle(self, scores: Sequence[CandidateScore]) -> None:
        """Measure the best first, so that the others need to be measured against it only.

        While nothing meets the target, failures count against their session: candidates of others come first, so that
        a budget is not spent on twenty configurations of the one that looks fast and does not last.
        """
        left = list(scores)
        while left:
            scored = min(left, key=self._failures)
            left.remove(scored)
            reached = best_reached(list(self._scores.values()))
            is_late = len(left) + 1 < len(scores) and self._budget.left_s <= 0  # one is tried, however late it is
            must = not is_late and not any(each.points for each in self._scores.values())
            if scored.score.upper >= reached and (must or self._affords(scored)):
                begun = self._contest.advance(scored, 0.0, reached) if must else scored
                self._keep(self._reference.steadily(partial(self._contest.settle, begun, reached)))
                self._settled.add(scored.candidate)

    def _failures(self, scored: CandidateScore) -> int:
        """Count failures of its session while nothing has met the target.

        Today's configuration comes before all others then, as a fallback.
        """
        if not self._settled or any(has_reached(each, self._target) for each in self._scores.values()):
            return 0
        if scored.candidate == self._space.default:
            return -1
        own = scored.candidate.restricted_to(SESSION_KEYS)
        return sum(each.restricted_to(SESSION_KEYS) == own for each in self._settled)

    def _affords(self, scored: CandidateScore) -> bool:
        share = _SEARCHING
        return self._has_time(share) and self._reference.affords(scored.candidate, self._reading_s)

    def _come_closer(self) -> None:
        """If nothing met the target, settle the nearest candidates, to report how near they come."""
        for _ in range(_CONFIRMED):
            left = [each for each in self._scores.values() if each.points and each.candidate not in self._settled]
            if self._best() or not left or not self._has_time(1.0):
                return
            p99_s = {each.candidate: min(point.measured.latency.p99.value for point in each.points) for each in left}
            nearest = min(left, key=lambda each: (self._failures(each), p99_s[each.candidate]))
            self._settle([replace(nearest, lost="")])

    def _look_around(self) -> None:
        """Climb from neighbor to neighbor, while one of them is better."""
        best = self._best()
        while best is not None:
            nearby = [each for each in self._space.neighbors(best.candidate) if each not in self._settled]
            viable = set(self._probes.viable)
            unsettled = [self._scores.get(each, self._enter(each)) for each in nearby if each in viable]
            self._settle([replace(each, lost="") for each in unsettled])
            found = self._best()
            if found is None or found.candidate == best.candidate or not self._has_time(_SEARCHING):
                return
            best = found

    def _rematch(self) -> None:
        """Measure near-ties again: differences between single measurements may be noise."""
        best = self._best()
        race = self._contest.race(best) if best else None
        if best is None or race is None:
            return
        if race.defends:
            self._settle_default()
        today = [each for each in self._measured() if race.defends and self._defends(each)]
        near = [each for each in self._measured() if self._may_win(each) and race.is_near(each)]
        near.sort(key=lambda each: -each.score.value)
        has_time, simplicity = partial(self._has_time, _REMATCH), self._space.simplicity
        raced = rematch([*today, *near], best, self._reference, has_time, race, simplicity=simplicity)
        for scored in raced:
            self._keep(scored)
        self._winner = raced[0].candidate if raced else None

    def _measured(self) -> list[CandidateScore]:
        return [each for each in self._by_score() if each.points]

    def _defends(self, scored: CandidateScore) -> bool:
        """Return true for today's configuration if it met the target: noise may have made it look worse."""
        return scored.candidate == self._space.today and has_reached(scored, self._target)

    def _may_win(self, scored: CandidateScore) -> bool:
        return not scored.lost or scored.candidate in self._settled

    def _settle_default(self) -> None:
        """Settle the default configuration, which the choice is compared with."""
        default = self._scores.get(self._space.default)
        if default is not None and default.points and self._has_time(_SEARCHING):
            settled = self._contest.settle(replace(default, lost=""), -math.inf)
            self._keep(replace(settled, lost=settled.lost or default.lost))

    def _best(self) -> CandidateScore | None:
        """The winner of the last race, or else the simplest of those that nothing is surely better than."""
        raced = self._scores[self._winner] if self._winner else None
        if raced and not raced.lost:
            return raced
        running = [each for each in self._scores.values() if not each.lost]
        best = max(running, key=lambda each: each.score.lower, default=None)
        if best is None or not has_reached(best, self._target):
            return None
        ties = [each for each in running if each is best or self._contest.is_tie(each, best)]
        return min(ties, key=lambda each: self._space.simplicity(each.candidate))

    def _confirm(self) -> tuple[CandidateScore | None, Point | None]:
        """The best one whose figures hold when it is measured again, and what it did."""
        for number in range(_CONFIRMED):
            best = self._best()
            if best is None or (number and self._budget.left_s < self._budget.start_s + self._reading_s):
                break
            promise, reason = confirm(self._trials, best, self._target, self._reference.level)
            if promise:
                self._notes += [f"the promise held at the second try; at the first, {reason}"] if reason else []
                return best, promise
            self._keep(best.out(reason))
        return None, None

    def _enter(self, candidate: Candidate) -> CandidateScore:
        return self._contest.enter(candidate, bound_of(candidate, self._probes.bare(candidate)).rate)

    def _keep(self, scored: CandidateScore) -> None:
        self._scores[scored.candidate] = scored

    def _by_score(self) -> list[CandidateScore]:
        return sorted(
            self._scores.values(),
            key=lambda each: (bool(each.lost), self._distance(each), -each.score.lower, -each.score.value),
        )

    def _distance(self, scored: CandidateScore) -> int:
        """0 for what was measured, 1 for what a server runs with at the beginning."""
        return 0 if scored.points else 1 if scored.candidate == self._reference.candidate else 2

    def _result(self, chosen: CandidateScore | None, promise: Point | None, curve: tuple[Point, ...]) -> Result:
        found = Conclusion(
            space=self._space,
            target=self._target,
            contest=self._contest,
            probes=self._probes,
            settled=self._settled,
            chosen=chosen,
            cores=self._cores,
        )
        rows = {each.candidate: found.row(each) for each in self._by_score() if each.points}
        bounds = bound_notes(self._space, self._probes, self._target)
        untried = [unmeasured(each, self._scores.get(each)) for each in self._probes.viable if each not in rows]
        return Result(
            target=self._target,
            chosen=rows.get(chosen.candidate) if chosen else None,
            promise=promise,
            closest=None if chosen else found.closest(list(rows.values())),
            default=rows.get(self._space.today),
            rows=tuple(rows.values()),
            front=pareto_front(list(rows.values())),
            exclusions=(*self._space.exclusions, *self._probes.refused, *untried),
            curve=curve,
            knee=knee(curve),
            readings=tuple(self._reference.readings),
            notes=(*self._reference.notes, *self._notes, *self._budget_notes(chosen), *bounds),
            spent_s=self._trials.spent_s,
            measurements=self._trials.count,
        )

    def _budget_notes(self, chosen: CandidateScore | None) -> list[str]:
        """Describe what the budget did not allow."""
        notes, budget = [], self._budget
        if budget.left_s < -0.5:
            notes.append(f"the budget of {budget.total_s:.0f} s was overrun by {-budget.left_s:.0f} s{budget.longest}")
        is_over = not self._has_time(_SEARCHING) or budget.searching_s < budget.start_s + self._reading_s
        if chosen is None and self._probes.viable and is_over:
            notes.append("the budget was spent before a configuration was proven: with a larger one the search goes on")
        return notes
