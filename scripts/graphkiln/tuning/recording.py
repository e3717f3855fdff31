"""Trials with a memory: what the journal holds is not measured again, and the time that it took counts as spent.

A search asks for the same measurements in the same order whenever it gets the same outcomes, so that one that was
killed goes on where it was. What a candidate takes down with it includes the tuner: a measurement that was begun
`_ATTEMPTS` times and never ended has failed. What may have been the machine's fault is measured again by the next run.
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

_ATTEMPTS = 3
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
        self._begun: Counter[str] = Counter()
        self.budget = Budget(math.inf)
        for number, event in enumerate(journal.events, 2):
            self._remember(number, event)

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
        outcome, took_s = self._once(task, lambda: self._trials.probe(session))
        if self._is_first(task):
            self.budget.take_probe(took_s)
        return outcome

    def measure(self, candidate: Candidate, load: LoadShape, seconds: float, seed: int) -> Measured | Failed:
        """As `Trials.measure`, once for the same arguments."""
        task = {"measure": candidate.as_json(), "load": load_as_json(load), "seconds": seconds, "seed": seed}
        outcome, took_s = self._once(task, lambda: self._trials.measure(candidate, load, seconds, seed))
        if self._is_first(task):
            self.budget.take(candidate, seconds, took_s, failed=isinstance(outcome, Failed))
        return outcome

    def _is_first(self, task: dict[str, Any]) -> bool:
        """Whether this run asks for it for the first time."""
        key = _key(task)
        is_first = key not in self._asked
        self._asked.add(key)
        return is_first

    def _once(self, task: dict[str, Any], work: Callable[[], _Outcome | Failed]) -> tuple[_Outcome | Failed, float]:
        key = _key(task)
        if key not in self._known:
            self._known[key] = self._new(task, work)
        outcome: Any
        outcome, took_s = self._known[key]
        return outcome, took_s

    def _new(self, task: dict[str, Any], work: Callable[[], _Outcome | Failed]) -> tuple[Outcome, float]:
        if self._begun[_key(task)] >= _ATTEMPTS:
            return self._finish(task, Failed(reason=f"the tuner died {_ATTEMPTS} times while it was measured"), 0.0)
        self._journal.append({"begun": task})
        begun_s = self._clock()
        try:
            outcome = work()
        except (KeyboardInterrupt, Exception):  # asked for, or the tuner's own fault: not the candidate's doing
            with suppress(MeasurementError):  # a full disk may be the fault
                self._journal.append({"interrupted": task})
            raise
        return self._finish(task, outcome, self._clock() - begun_s)

    def _finish(self, task: dict[str, Any], outcome: Outcome, seconds: float) -> tuple[Outcome, float]:
        self._journal.append({"done": task, "took_s": seconds, "outcome": outcome_as_json(outcome)})
        return outcome, seconds

    def _remember(self, number: int, event: dict[str, Any]) -> None:
        try:
            if "begun" in event:
                self._begun[_key(event["begun"])] += 1
            elif "interrupted" in event:
                self._begun[_key(event["interrupted"])] -= 1
            else:
                self._remember_done(_key(event["done"]), outcome_from_json(event["outcome"]), float(event["took_s"]))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise MeasurementError(
                f"{self._journal.path} is damaged at line {number}: {error!r}", hint="delete it: all is measured anew"
            ) from error

    def _remember_done(self, key: str, outcome: Outcome, took_s: float) -> None:
        if isinstance(outcome, Failed) and outcome.passing:
            self._begun[key] -= 1  # it ended
        else:
            self._known[key] = (outcome, took_s)


def _key(task: dict[str, Any]) -> str:
    return json.dumps(task, sort_keys=True)
