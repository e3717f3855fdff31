"""Trials with a journal: a measurement that it holds is not repeated, and the time that it took counts as spent.

A search asks for the same measurements in the same order whenever it gets the same outcomes, so that one that was
killed continues where it was. The budget is charged neither with the measurement that a kill cut off nor with the
second start of the server. Failures that the machine may have caused are measured again by the next run.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

from graphkiln.tuning.budget import Budget
from graphkiln.tuning.candidate import Candidate
from graphkiln.tuning.journal import Journal
from graphkiln.tuning.records import Outcome, load_as_json, outcome_as_json, outcome_from_json
from graphkiln.tuning.trials import Bare, Failed, LoadShape, Measured, Trials
from graphkiln_backend.graph.errors import MeasurementError

# A candidate can take the tuner with it: it fills the memory until the kernel kills processes, or
# takes the machine down.
_MOST_DEATHS = 3  # of the tuner in one measurement; after these its candidate has failed

_Outcome = TypeVar("_Outcome", bound=Outcome)


class RecordedTrials:
    """Implements `Trials` on top of others.

    Args:
        trials: What measures.
        journal: What was measured before, and what will be.
        clock: Seconds since any moment; differences are what is spent.

    Attributes:
        budget: Charged with what was asked for, whether it was measured now or in an earlier run: a search that goes on
            sees its budget shrink as it did the first time. Endless until a search says what it may take.

    Raises:
        MeasurementError: The journal is damaged.
    """

    def __init__(self, trials: Trials, journal: Journal, clock: Callable[[], float]) -> None:
        self._trials, self._journal, self._clock = trials, journal, clock
        self._known: dict[str, tuple[Outcome, float]] = {}
        self._asked: set[str] = set()
        self._failed: dict[Candidate, Failed] = {}
        self._begun: str | None = None
        self._deaths: Counter[str] = Counter()
        self._running: Candidate | None = None
        self.budget = Budget(math.inf)
        for number, event in enumerate(journal.events, 2):
            self._remember(number, event)
        self._end(died=True)

    @property
    def spent_s(self) -> float:
        """Seconds that the measurements took that were asked for."""
        return self.budget.spent_s

    @property
    def count(self) -> int:
        """How many measurements were asked for."""
        return len(self._asked)

    @property
    def recorded_s(self) -> float:
        """Seconds that all measurements of the journal took."""
        return sum(took_s for _, took_s in self._known.values())

    def probe(self, session: Candidate) -> Bare | Failed:
        """As `Trials.probe`, once."""
        task = {"probe": session.as_json()}
        outcome, took_s = self._once(task, lambda: self._trials.probe(session), self._stop)
        if self._is_first(task):
            self.budget.take_probe(took_s)
        return outcome

    def measure(self, candidate: Candidate, load: LoadShape, seconds: float, seed: int) -> Measured | Failed:
        """As `Trials.measure`, once for the same arguments.

        A candidate that failed once has failed: what crashed under one load is not asked how it does under another.
        """
        if candidate in self._failed:
            return self._failed[candidate]
        task = {"measure": candidate.as_json(), "load": load_as_json(load), "seconds": seconds, "seed": seed}
        outcome, took_s = self._once(
            task, lambda: self._trials.measure(candidate, load, seconds, seed), lambda: self._keep_warm(candidate, load)
        )
        if isinstance(outcome, Failed):
            self._failed[candidate] = outcome
        if self._is_first(task):
            self.budget.take(candidate, seconds, took_s, failed=isinstance(outcome, Failed))
        return outcome

    def warm(self, candidate: Candidate, load: LoadShape) -> None:
        """As `Trials.warm`; nothing is kept of it."""
        self._trials.warm(candidate, load)

    def _stop(self) -> None:
        """A bare session is timed alone."""
        self._running = None

    def _keep_warm(self, candidate: Candidate, load: LoadShape) -> None:
        """Where the tuner died since a server ran that would run now, another one takes its place."""
        if self.budget.serves(candidate) and self._running != candidate:
            self._trials.warm(candidate, load)
        self._running = candidate

    def _is_first(self, task: dict[str, Any]) -> bool:
        """Whether this run asks for it for the first time."""
        key = _key(task)
        is_first = key not in self._asked
        self._asked.add(key)
        return is_first

    def _once(
        self, task: dict[str, Any], work: Callable[[], _Outcome | Failed], prepare: Callable[[], None]
    ) -> tuple[_Outcome | Failed, float]:
        key = _key(task)
        if key not in self._known:
            self._known[key] = self._new(task, work, prepare)
        outcome: Any
        outcome, took_s = self._known[key]
        return outcome, took_s

    def _new(
        self, task: dict[str, Any], work: Callable[[], _Outcome | Failed], prepare: Callable[[], None]
    ) -> tuple[Outcome, float]:
        if (deaths := self._deaths[_key(task)]) >= _MOST_DEATHS:
            return self._finish(task, Failed(reason=f"the tuner died {deaths} times while it was measured"), 0.0)
        self._journal.append({"begun": task})
        try:
            prepare()
            begun_s = self._clock()
            outcome = work()
        except (KeyboardInterrupt, Exception):  # asked for, or the tuner's own fault: not the candidate's doing
            with suppress(MeasurementError):  # a full disk may be the fault
                self._journal.append({"interrupted": task})
            raise
        return self._finish(task, outcome, self._clock() - begun_s)

    def _finish(self, task: dict[str, Any], outcome: Outcome, seconds: float) -> tuple[Outcome, float]:
        """Keeps an outcome; what is gone on with is what another run will read."""
        kept = outcome_as_json(outcome)
        self._journal.append({"done": task, "took_s": seconds, "outcome": kept})
        return outcome_from_json(kept), seconds

    def _remember(self, number: int, event: dict[str, Any]) -> None:
        try:
            if "begun" in event:
                self._end(died=True)
                self._begun = _key(event["begun"])
                return
            self._end(died=False)
            if "interrupted" not in event:
                self._remember_done(_key(event["done"]), outcome_from_json(event["outcome"]), float(event["took_s"]))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise MeasurementError(
                f"{self._journal.path} is damaged at line {number}: {error!r}", hint="delete it: all is measured anew"
            ) from error

    def _end(self, *, died: bool) -> None:
        """Close the measurement that was begun last; measurements never overlap."""
        if died and self._begun:
            self._deaths[self._begun] += 1
        self._begun = None

    def _remember_done(self, key: str, outcome: Outcome, took_s: float) -> None:
        if not (isinstance(outcome, Failed) and outcome.passing):
            self._known[key] = (outcome, took_s)


def _key(task: dict[str, Any]) -> str:
    return json.dumps(task, sort_keys=True)
