"""Successive halving: short measurements of many candidates, longer ones of those that are left.

A candidate leaves for one of two reasons, which its standing keeps: what it can still reach is below what another
proved (that is final), or it ranks below the best third of a rung (a guess: the search looks again around the best).

Source: K. Jamieson, A. Talwalkar, "Non-stochastic Best Arm Identification and Hyperparameter Optimization" (2016).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial

from graphkiln.tuning.candidate import Candidate
from graphkiln.tuning.drift import Reference
from graphkiln.tuning.standing import Contest, Standing

FINALISTS = 4
RUNGS = 6
NO_TIME = "the budget was spent before it was measured"
"""Why a candidate left that was not measured."""
_KEPT = 3
"""One of so many candidates of a rung goes on to the next."""
_CHUNK = 8
"""Candidates between two looks at the machine's speed."""


class Ladder:
    """Thins out the candidates, rung by rung.

    Args:
        contest: What they are compared by.
        reference: Watches the machine.
        has_time: Whether the budget allows to go on.
        keep: Candidates that leave only when they are surely worse.
    """

    def __init__(
        self, contest: Contest, reference: Reference, has_time: Callable[[], bool], keep: Sequence[Candidate] = ()
    ) -> None:
        self._contest, self._reference, self._has_time, self._keep = contest, reference, has_time, frozenset(keep)

    def climb(self, entered: Sequence[Standing], seconds: float) -> list[Standing]:
        """Measures them until at most `FINALISTS` are in the contest, or the time is up.

        Args:
            entered: The standings to begin with.
            seconds: Of the first rung's measurements; each next rung's are twice as long.

        Returns:
            All of them, those that are in the contest first, the best of them first.
        """
        standings = list(entered)
        for number in range(RUNGS):
            running = [each for each in standings if not each.lost]
            is_first = number == 0  # no score says anything before that
            if (len(running) <= FINALISTS and not is_first) or not self._has_time():
                break
            rung_s = seconds * 2**number
            climbed = self._halve(self._rung(running, rung_s), rung_s)
            standings = [*climbed, *(each for each in standings if each.lost)]
        return sorted(standings, key=lambda each: (bool(each.lost), -each.score.value))

    def _rung(self, running: Sequence[Standing], seconds: float) -> list[Standing]:
        done: list[Standing] = []
        for start in range(0, len(running), _CHUNK):
            chunk = running[start : start + _CHUNK]
            if not self._has_time():
                return [*done, *(each if each.points else each.out(NO_TIME) for each in running[start:])]
            reached = best_reached([*done, *running])
            done += self._reference.steadily(partial(self._advance_all, chunk, seconds, reached))
        return done

    def _advance_all(self, chunk: Sequence[Standing], seconds: float, reached: float) -> list[Standing]:
        return [self._advance(each, seconds, reached) for each in chunk]

    def _advance(self, standing: Standing, seconds: float, reached: float) -> Standing:
        if self._has_time():
            return self._contest.advance(standing, seconds, reached)
        return standing if standing.points else standing.out(NO_TIME)

    def _halve(self, rung: Sequence[Standing], seconds: float) -> list[Standing]:
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

    def _beaten(self, standing: Standing, reached: float) -> str:
        if standing.score.upper >= reached:
            return ""
        return (
            f"{self._contest.describe(standing.score.upper)} at best, where another has "
            f"{self._contest.describe(reached)}"
        )


def best_reached(standings: Sequence[Standing]) -> float:
    """The best score that was reached; minus infinity where there are no standings."""
    return max((each.score.lower for each in standings), default=-math.inf)
