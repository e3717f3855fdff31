"""What is said of each candidate when a search is over: what it reached, what limits it, and why it was not chosen."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from graphkiln.tuning.bounds import bound_of
from graphkiln.tuning.candidate import SESSION_KEYS, Candidate
from graphkiln.tuning.ladder import NO_TIME
from graphkiln.tuning.limits import limit_of
from graphkiln.tuning.result import Row
from graphkiln.tuning.shortlist import Probes
from graphkiln.tuning.space import Exclusion, Space
from graphkiln.tuning.standing import Contest, Standing
from graphkiln.tuning.target import Objective, Target
from graphkiln.tuning.trials import Bare


def has_reached(standing: Standing, target: Target) -> bool:
    """Whether a standing met the target under some load."""
    lower = standing.score.lower
    return math.isfinite(lower) and (lower > 0 or target.objective is not Objective.THROUGHPUT)


@dataclass(frozen=True, kw_only=True)
class Conclusion:
    """A search that is over.

    Attributes:
        space: What could be chosen.
        target: What was to be met.
        contest: What candidates were compared by.
        probes: What bare sessions said.
        settled: Those whose scores are as exact as they get.
        chosen: What was chosen; None for nothing.
        cores: Of the machine.
    """

    space: Space
    target: Target
    contest: Contest
    probes: Probes
    settled: Collection[Candidate]
    chosen: Standing | None
    cores: int

    def row(self, standing: Standing) -> Row:
        """A candidate that was measured."""
        bare, chosen = self.probes.bare(standing.candidate), self.chosen
        if chosen and standing.candidate != chosen.candidate and not standing.lost:
            standing = standing.out(self._why_not(standing, chosen))
        is_met = has_reached(standing, self.target)
        words = self.contest.describe(standing.score.lower if is_met else standing.score.value)
        limit = limit_of(standing, bare, self.target, self.cores)
        score = words if is_met else f"{words}; no load met the target"
        return Row(standing=standing, score=score, limit=limit, accuracy_lost=bare.accuracy_lost)

    def closest(self, rows: Sequence[Row]) -> Row | None:
        """What is told where nothing was proven: the best that met the target unproven, or else the lowest p99."""
        met = [row for row in rows if has_reached(row.standing, self.target)]
        measured = [row for row in rows if row.best_point]
        lowest = min(measured, key=lambda row: row.best_point.measured.latency.p99.value, default=None)  # type: ignore[union-attr]
        return max(met, key=lambda row: row.standing.score.lower) if met else lowest

    def _why_not(self, standing: Standing, chosen: Standing) -> str:
        if self.contest.is_tie(standing, chosen) and self._is_simpler(chosen, standing):
            return "no measurement tells it from the chosen one, which is simpler"
        best = self.contest.describe(chosen.score.lower)
        if standing.candidate not in self.settled:
            return "the budget was spent before it was compared with the chosen one"
        if not has_reached(standing, self.target):
            return f"did not meet the target at the load of the chosen one: {best}"
        return f"{self.contest.describe(standing.score.lower)}, the chosen one {best}"

    def _is_simpler(self, one: Standing, other: Standing) -> bool:
        return self.space.simplicity(one.candidate) < self.space.simplicity(other.candidate)


def unmeasured(candidate: Candidate, standing: Standing | None) -> Exclusion:
    """A candidate that has no row.

    Args:
        candidate: Which.
        standing: What is known of it; None where it never took part.
    """
    reason = standing.lost if standing else ""
    words = reason or "not measured: the budget went to more promising ones"
    return Exclusion(candidate=candidate, reason=words, by_budget=reason in ("", NO_TIME))


def bound_notes(space: Space, probes: Probes, target: Target) -> list[str]:
    """What comes closest where bare sessions rule every candidate out: the fastest one, and the most that any reach."""
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
