"""Near-ties are measured again, with other arrivals, until they are told apart: a race at one rate.

A bracket of rates (`rate_contest`) is exact about the arrivals that it was measured with, and no more exact than the
machine was steady: where measurements of the same differ by 5%, the better of two may lose. Those that came close to
the best get its rate, all with the same new arrivals, round after round; who is surely slower leaves. Pairs of the same
round are compared, so that what the arrivals and the moment do to both cancels out.

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
from graphkiln.tuning.standing import Standing
from graphkiln.tuning.statistics import Interval, requests_needed
from graphkiln.tuning.trials import Failed, OpenLoop

Simplicity = Callable[[Candidate], tuple[int, int, str]]

NEAR = 0.93
"""Share of the best rate from which on a candidate may be as good."""
_RUNNERS = 5
_ROUNDS = 5
_FEWEST_ROUNDS = 2
_SURE = 1.5
"""Standard errors between two that are told apart: a wrong choice among near-ties costs little."""
_LEAST_SPREAD = 0.02
"""Of the logarithm of a p99, however alike two rounds are."""
_SLOWER = 10
"""Requests beyond the p99 of one measurement, as in `rate_contest`."""


def rematch(
    near: Sequence[Standing],
    best: Standing,
    reference: Reference,
    has_time: Callable[[], bool],
    longest_s: float,
    *,
    simplicity: Simplicity,
) -> list[Standing]:
    """Tells near-ties apart.

    Args:
        near: What came close, `best` among them, the best first.
        best: Whose rate all of them get.
        reference: Measures.
        has_time: Whether the budget allows another measurement.
        longest_s: Of one measurement.
        simplicity: A key to sort by, the simplest first: of those that no round tells apart, it decides.

    Returns:
        The standings of all that took part: the winner's with that rate as what it reached, the others lost. Nothing
        where there was nobody to compare, or no time for two rounds: one tells nobody apart.
    """
    running = list({each.candidate: each for each in (best, *near[:_RUNNERS])}.values())
    if len(running) < 2:
        return []
    runners, rate = list(running), float(f"{best.score.lower:.4g}")
    slowness: dict[Candidate, list[float]] = {each.candidate: [] for each in running}
    seconds = min(requests_needed(_SLOWER) / rate, longest_s)

    def measure(candidate: Candidate, number: int) -> float | None:
        """Logarithm of its p99, or None where the time is up."""
        if not (has_time() and reference.affords(candidate, seconds)):
            return None
        outcome = reference.measure(candidate, OpenLoop(rate), seconds, number)
        return math.inf if isinstance(outcome, Failed) else math.log(outcome.latency.p99.value)

    for number in range(1, _ROUNDS + 1):
        found = _round(running, measure, number)
        if len(found) < len(running):
            break
        for candidate, value in found.items():
            slowness[candidate].append(value)
        running = _left(running, slowness)
        if len(running) == 1:
            break
    if len(slowness[running[0].candidate]) < _FEWEST_ROUNDS and len(running) > 1:
        return []
    winner = min(running, key=lambda each: simplicity(each.candidate))
    reached = Interval(max(winner.score.value, rate), rate, max(winner.score.upper, rate))
    return [
        replace(winner, lost="", score=reached),
        *(each.out(_reason(each, winner, slowness)) for each in runners if each.candidate != winner.candidate),
    ]


def _round(
    running: Sequence[Standing], measure: Callable[[Candidate, int], float | None], number: int
) -> dict[Candidate, float]:
    """What each one did; of a part only where the time is up."""
    found = {}
    for each in running:
        slowness = measure(each.candidate, number)
        if slowness is None:
            break
        found[each.candidate] = slowness
    return found


def _left(running: Sequence[Standing], slowness: Mapping[Candidate, Sequence[float]]) -> list[Standing]:
    """Those that may still be the fastest."""
    lead = min(running, key=lambda each: statistics.fmean(slowness[each.candidate]))
    return [each for each in running if not _is_slower(slowness[each.candidate], slowness[lead.candidate])]


def _is_slower(one: Sequence[float], lead: Sequence[float]) -> bool:
    if not all(map(math.isfinite, one)):
        return one is not lead
    if len(one) < 2:
        return False
    differences = [a - b for a, b in zip(one, lead, strict=True)]
    spread = max(statistics.stdev(differences), _LEAST_SPREAD)
    return statistics.fmean(differences) > _SURE * spread / math.sqrt(len(differences))


def _reason(lost: Standing, winner: Standing, slowness: Mapping[Candidate, Sequence[float]]) -> str:
    own, rounds = slowness[lost.candidate], slowness[winner.candidate]
    if not all(map(math.isfinite, own)):
        return "failed when near-ties were measured again"
    ratio = math.exp(statistics.fmean(own) - statistics.fmean(rounds[: len(own)]))
    told = f"a near-tie, measured {len(own)} times more: {ratio:.2f} times the p99 at the same rate"
    return told if _is_slower(own, rounds[: len(own)]) else f"{told}, which says nothing; the chosen one is simpler"
