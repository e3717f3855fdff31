"""Near-ties are measured again, with other arrivals, until they are told apart: a race under one load.

A bracket of rates (`rate_contest`) is exact about the arrivals that it was measured with, and a latency
(`load_contest`) about its minute; neither is more exact than the machine was steady. Where measurements of the same
differ by 5%, the better of two may lose. Those that came close to the best get the same load, all with the same new
arrivals, round after round; who is surely slower leaves. Pairs of the same round are compared, so that what the
arrivals and the moment do to both cancels out. Of those that are left the simplest wins: what serves today, where it is
among them.

Source: O. Maron, A. Moore, "Hoeffding Races" (1994); M. Birattari and others, "A Racing Algorithm for Configuring
Metaheuristics" (2002), with paired differences.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from graphkiln.tuning.candidate import Candidate
from graphkiln.tuning.drift import Reference
from graphkiln.tuning.standing import Race, Standing
from graphkiln.tuning.trials import Failed

Simplicity = Callable[[Candidate], tuple[int, int, str]]

_RUNNERS = 5
"""Beside the best."""
_ROUNDS = 5


def rematch(
    near: Sequence[Standing],
    best: Standing,
    reference: Reference,
    has_time: Callable[[], bool],
    race: Race,
    *,
    simplicity: Simplicity,
) -> list[Standing]:
    """Tells near-ties apart.

    Args:
        near: What came close, those first that are to take part before others.
        best: Takes part in any case.
        reference: Measures.
        has_time: Whether the budget allows another measurement.
        race: What they are compared by.
        simplicity: A key to sort by, the simplest first: of those that no round tells apart, it decides.

    Returns:
        The standings of all that took part: the winner's first, the others lost. Nothing where there was nobody to
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
    """How many can run the fewest rounds within the budget."""
    budget = reference.trials.budget
    each_s = race.fewest * (budget.start_s + race.seconds)
    return int(min(_RUNNERS + 1, max(0.0, budget.searching_s / each_s)))


def _round(
    running: Sequence[Standing], measure: Callable[[Candidate, int], float | None], number: int
) -> dict[Candidate, float]:
    """What each one did; of a part only where the time is up."""
    found = {}
    for each in running:
        cost = measure(each.candidate, number)
        if cost is None:
            break
        found[each.candidate] = cost
    return found


def _left(running: Sequence[Standing], costs: Mapping[Candidate, Sequence[float]], race: Race) -> list[Standing]:
    """Those that may still be the best."""
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


def _reason(lost: Standing, winner: Standing, costs: Mapping[Candidate, Sequence[float]], race: Race) -> str:
    own, rounds = costs[lost.candidate], costs[winner.candidate]
    if not all(map(math.isfinite, own)):
        return "more than 1 in 100 of its requests failed when near-ties were measured again"
    ratio = math.exp(statistics.fmean(own) - statistics.fmean(rounds[: len(own)]))
    told = f"a near-tie, measured {len(own)} times more: {ratio:.2f} times the {race.what}"
    is_told_apart = _is_worse(own, rounds[: len(own)], race)
    return told if is_told_apart else f"{told}, which says nothing; the chosen one is simpler"
