"""One configuration is measured again and again between the others, to see when the machine becomes slower or faster.

Where its throughput leaves the level by more than `TOLERANCE`, the work that was going on is done again, and from then
on loads and results are converted to the machine of the first reading: on a machine that is k times slower, k times
fewer requests a second make the same queue in slow motion. A smaller drift lies within the noise of a short reading.
The confirmation at the end of a search is measured without conversion: its promise holds on the machine as it is.

Before each reading the same load runs for a moment that does not count: a server that has just started is slower than
the machine, and readings would differ by how long it had been running.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import TypeVar

from graphkiln.tuning.candidate import INSTANCES, MAX_BATCH_SIZE, Candidate
from graphkiln.tuning.recording import RecordedTrials
from graphkiln.tuning.trials import ClosedLoop, Failed, LoadShape, Measured, OpenLoop

TOLERANCE = 0.08
_EVERY_S = 45.0
"""Seconds between readings: a reading costs a tenth of that."""
_WARM_S = 1.0
"""Of the load before a reading."""
_REPEATS = 2
_SEEDS = 1000
"""Between the seeds of work that is done again; more than a search uses."""
_Work = TypeVar("_Work")


@dataclass(frozen=True, kw_only=True, slots=True)
class Reading:
    """One measurement of the reference.

    Attributes:
        spent_s: Of the budget, when it was over.
        rate: Responses per second.
        level: Speed of the machine, as a share of that at the first reading.
    """

    spent_s: float
    rate: float
    level: float


class Reference:
    """Measures candidates on a machine whose speed is watched.

    Args:
        trials: What measures.
        seconds: Of a reading.
        seed: Of the arrivals of all measurements.
    """

    def __init__(self, trials: RecordedTrials, seconds: float, seed: int = 0) -> None:
        self.trials, self._seconds, self._seed = trials, seconds, seed
        self.candidate: Candidate | None = None
        self.level = 1.0
        self.readings: list[Reading] = []
        self.notes: list[str] = []
        self._epoch = 0

    def begin(self, candidates: Iterable[Candidate]) -> dict[Candidate, str]:
        """Takes the first candidate that can be measured as the reference.

        Returns:
            Those before it that failed, with the reasons.
        """
        failed = {}
        for candidate in candidates:
            outcome = self._read(candidate)
            if isinstance(outcome, Measured):
                self.candidate = candidate
                break
            failed[candidate] = outcome.reason
            if self.trials.budget.searching_s <= 0:
                break
        return failed

    def affords(self, candidate: Candidate, seconds: float) -> bool:
        """Whether the budget bears a measurement of so many seconds, with the start of a server where it takes one."""
        return self.trials.budget.affords(candidate, seconds)

    def measure(self, candidate: Candidate, load: LoadShape, seconds: float, seed: int = 0) -> Measured | Failed:
        """Measures a candidate; load and outcome are those of the machine at the first reading."""
        offered = load
        if isinstance(load, OpenLoop) and self.level != 1:
            offered = OpenLoop(float(f"{load.rate * self.level:.4g}"))
        number = self._seed * 1_000_000 + self._epoch * _SEEDS + seed
        outcome = self.trials.measure(candidate, offered, round(seconds, 3), number)
        if isinstance(outcome, Failed) or self.level == 1:
            return outcome
        return replace(
            outcome,
            latency=outcome.latency.scaled(self.level),
            throughput=outcome.throughput.scaled(1 / self.level),
            level=self.level,
        )

    def steadily(self, work: Callable[[], _Work]) -> _Work:
        """Does work that measures, and does it again where the machine changed meanwhile.

        Args:
            work: Measures only through this object; about a minute at most.
        """
        result = work()
        for _ in range(_REPEATS):
            if not self._has_shifted():
                return result
            before = self.trials.count
            again = work()
            if self.trials.count == before:  # no time for it: what was measured is better than nothing
                self.notes.append(f"the budget did not allow to repeat what the machine disturbed at {self._now}")
                return result
            result = again
        self.notes.append(f"the machine did not come to rest at {self._now}: results there are doubtful")
        return result

    @property
    def _now(self) -> str:
        return f"{self.trials.spent_s:.0f} s"

    def _has_shifted(self) -> bool:
        """Whether a reading that is due finds another level; it counts from then on."""
        if self.candidate is None or self.trials.spent_s - self.readings[-1].spent_s < _EVERY_S:
            return False
        if not self.affords(self.candidate, 2 * _WARM_S + self._seconds):  # a second warm-up comes with it
            return False
        if isinstance(self._read(self.candidate), Failed):
            self.notes.append(f"the reference failed at {self.trials.spent_s:.0f} s")
            return False
        level = self.readings[-1].level
        if abs(level / self.level - 1) <= TOLERANCE:
            return False
        self.notes.append(
            f"the machine's speed went from {self.level:.0%} to {level:.0%} by {self.trials.spent_s:.0f} s: "
            "measured again"
        )
        self.level = level
        self._epoch += 1
        return True

    def _read(self, candidate: Candidate) -> Measured | Failed:
        callers = 2 * candidate.number(INSTANCES) * max(1, candidate.number(MAX_BATCH_SIZE))
        seed = self._seed * 1_000_000 + _SEEDS * _SEEDS // 2 + len(self.readings)
        load = ClosedLoop(callers)
        outcome = self.trials.measure(candidate, load, _WARM_S, seed + _SEEDS)
        if isinstance(outcome, Measured):
            outcome = self.trials.measure(candidate, load, self._seconds, seed)
        if isinstance(outcome, Measured):
            rate = outcome.throughput.value
            level = rate / self.readings[0].rate if self.readings and self.readings[0].rate else 1.0
            self.readings.append(Reading(spent_s=self.trials.spent_s, rate=rate, level=level or self.level))
        return outcome
