"""Trials with a memory: what the journal holds is not measured again, and the time that it took counts as spent.

A search asks for the same measurements in the same order whenever it gets the same outcomes, so that one that was
killed goes on where it was. What a kill costs is charged to nobody: neither the measurement that it cut off, nor the
second start of the server that was running, which is warmed up as it was. What a candidate takes down with it includes
the tuner (`deaths`). What may have been the machine's fault is measured again by the next run.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from graphkiln.tuning.budget import Budget
from graphkiln.tuning.candidate import Candidate
from graphkiln.tuning.journal import Journal
from graphkiln.tuning.machine_faults import oom_kills
from graphkiln.tuning.records import Outcome, load_as_json, outcome_as_json, outcome_from_json
from graphkiln.tuning.trials import Bare, Failed, LoadShape, Measured, Trials
from graphkiln_backend.graph.errors import MeasurementError

# Deaths of the tuner in the middle of a measurement, and what they say of the candidate that was measured.
#
# A candidate can take the tuner with it: it fills the memory until the kernel kills processes, or it takes the whole
# machine down. Both leave a trace that outlives the tuner: the kernel has killed for want of memory since, or the
# machine was started again. Where there is none, whatever ended the tuner (kill -9, a session that was closed, a node
# that was drained) says nothing of the candidate, however often it comes at the same measurement; it counts at last
# all the same, because not everything that kills for want of memory is the kernel.
#
# Source: random(4) (`boot_id`); Linux kernel documentation, "/proc/vmstat" (`oom_kill`).

TRACED, ALL = 3, 20
"""Deaths in one measurement after which its candidate has failed: those that left a trace, and all of them."""
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
Machine = Mapping[str, Any]


def machine_now() -> dict[str, Any]:
    """What a death changes of a machine that it has to do with, as JSON data: `boot` and `oom_kills`."""
    boot = ""
    with suppress(OSError):
        boot = _BOOT_ID.read_text().strip()
    return {"boot": boot, "oom_kills": oom_kills()}


class Deaths:
    """Counts them while a journal is read, in its order: measurements never overlap."""

    def __init__(self) -> None:
        self._open: tuple[str, Machine] | None = None
        self._all: Counter[str] = Counter()
        self._traced: Counter[str] = Counter()

    def begin(self, key: str, machine: Machine) -> None:
        """A measurement was begun: one that was begun before it and is still open never ended.

        Args:
            key: Of the measurement.
            machine: As `machine_now` gave it then; empty where nobody asked.

        Raises:
            KeyError: It is something else; TypeError and ValueError likewise.
        """
        now = {"boot": str(machine["boot"]), "oom_kills": int(machine["oom_kills"])} if machine else {}
        self.close(now)
        self._open = key, now

    def end(self) -> None:
        """The measurement that was begun last came to an end, whichever."""
        self._open = None

    def close(self, machine: Machine) -> None:
        """Nothing more is known of what is open: the tuner died in it before the machine was in this state."""
        if self._open:
            self._count(*self._open, machine)
        self._open = None

    def _count(self, key: str, before: Machine, after: Machine) -> None:
        self._all[key] += 1
        self._traced[key] += _has_trace(before, after)

    def verdict(self, key: str) -> str:
        """Why a measurement is not begun once more; empty where it is."""
        if self._traced[key] >= TRACED:
            how = "for want of memory, or with the whole machine"
            return f"the tuner died {self._traced[key]} times while it was measured, {how}"
        return f"the tuner died {self._all[key]} times while it was measured" if self._all[key] >= ALL else ""


def _has_trace(before: Machine, after: Machine) -> bool:
    if not (before and after):
        return False
    return bool(before["boot"] != after["boot"] or after["oom_kills"] > before["oom_kills"])


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
        self._deaths = Deaths()
        self._running: Candidate | None = None
        self.budget = Budget(math.inf)
        for number, event in enumerate(journal.events, 2):
            self._remember(number, event)
        self._deaths.close(machine_now())

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
        if reason := self._deaths.verdict(_key(task)):
            return self._finish(task, Failed(reason=reason), 0.0)
        self._journal.append({"begun": task, "machine": machine_now()})
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
                self._deaths.begin(_key(event["begun"]), event.get("machine") or {})
            elif "interrupted" in event:
                self._deaths.end()
            else:
                self._deaths.end()
                self._remember_done(_key(event["done"]), outcome_from_json(event["outcome"]), float(event["took_s"]))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise MeasurementError(
                f"{self._journal.path} is damaged at line {number}: {error!r}", hint="delete it: all is measured anew"
            ) from error

    def _remember_done(self, key: str, outcome: Outcome, took_s: float) -> None:
        if not (isinstance(outcome, Failed) and outcome.passing):
            self._known[key] = (outcome, took_s)


def _key(task: dict[str, Any]) -> str:
    return json.dumps(task, sort_keys=True)
