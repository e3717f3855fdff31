"""Detection of changes of the machine's speed, by measuring one reference configuration again and again.

If its throughput changes, the current work is repeated, and from then on loads and results are converted to the
machine's speed at the first reading: on a machine that is k times slower, a k times lower rate makes the same queue in
slow motion. The confirmation at the end of a search is measured without conversion.

Repeated work is expensive, a reading takes only a second or two. A change therefore counts only if two readings in a
row agree: each deviates by more than `TOLERANCE`, and its 95% interval overlaps with none of those at the current
level. The rate of a reading is computed from the mean latency of callers in a closed loop (Little's law), because
responses that arrive in whole batches are too few per second to be counted. Its interval is computed from the means of
successive requests; the second reading is for slower noise.

Each reading is preceded by a warm-up, because a server is slower at first.

Sources: J. D. C. Little, "A Proof for the Queuing Formula: L = lambda W" (1961); A. M. Law, "Simulation Modeling and
Analysis", 5th ed. (2015), 9.5.3 (batch means); D. C. Montgomery, "Introduction to Statistical Quality Control", 7th ed.
(2013), 5.3 (rules that ask for several points in a row, where one alone is a false alarm too often).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from graphkiln.tuning.candidate import INSTANCES, MAX_BATCH_SIZE, Candidate
from graphkiln.tuning.journal import RecordedTrials
from graphkiln.tuning.statistics import Interval
from graphkiln.tuning.trials import WARM_S, ClosedLoop, Failed, LoadShape, Measured, OpenLoop

# Relative deviation of a reading from the level that counts as noise.
TOLERANCE = 0.08
# Seconds between readings; a reading takes about a tenth of that.
_EVERY_S = 45.0
# Number of readings in a row that must agree.
_AGREEING = 2
# Number of readings at the current level that a new one is compared with.
_REMEMBERED = 4
_REPEATS = 2
# Distance between the seeds of repeated work; larger than the number of seeds of a search.
_SEEDS = 1000
_Work = TypeVar("_Work")


@dataclass(frozen=True, kw_only=True, slots=True)
class Reading:
    """One measurement of the reference.

    Attributes:
        spent_s: Seconds of the budget spent at its end.
        rate: Responses per second.
        level: Speed of the machine relative to the first reading.
        lowest: Lower 95% bound on the level.
        highest: Upper 95% bound on the level.
    """

    spent_s: float
    rate: float
    level: float
    lowest: float = 0.0
    highest: float = math.inf


class Reference:
    """Measurement of candidates on a machine whose speed is monitored."""

    def __init__(self, trials: RecordedTrials, seconds: float, seed: int = 0) -> None:
        self.trials, self._seconds, self._seed = trials, seconds, seed
        self.candidate: Candidate | None = None
        self.level = 1.0
        self.readings: list[Reading] = []
        self.notes: list[str] = []
        self._steady: deque[Reading] = deque(maxlen=_REMEMBERED)
        self._epoch = 0

    def begin(self, candidates: Iterable[Candidate]) -> dict[Candidate, str]:
        """Choose the first candidate that can be measured as the reference.

        Returns:
            Failed candidates before it, with the reasons.
        """
        failed = {}
        for candidate in candidates:
            outcome = self._read(candidate, warms_up=True)
            if isinstance(outcome, Measured):
                self.candidate = candidate
                self._steady.append(self.readings[-1])
                break
            failed[candidate] = outcome.reason
            if self.trials.budget.searching_s <= 0:
                break
        return failed

    def affords(self, candidate: Candidate, seconds: float) -> bool:
        """Return true if the budget allows a measurement, including a server start if needed."""
        return self.trials.budget.affords(candidate, seconds)

    def measure(self, candidate: Candidate, load: LoadShape, seconds: float, seed: int = 0) -> Measured | Failed:
        """Measure a candidate; load and outcome are converted to the machine's speed at the first reading."""
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
        """Run work, and repeat it if the machine's speed changed during it.

        Args:
            work: Measures only through this object; takes about a minute at most.
        """
        result = work()
        for _ in range(_REPEATS):
            if not self._has_shifted():
                return result
            before = self.trials.count
            again = work()
            if self.trials.count == before:  # no time left: keep the disturbed result
                self.notes.append(
                    f"at {self._now}, the machine's speed changed, but there was no time to measure again"
                )
                return result
            result = again
        self.notes.append(f"at {self._now}, the machine's speed kept changing: results are unreliable")
        return result

    @property
    def _now(self) -> str:
        return f"{self.trials.spent_s:.0f} s"

    def _has_shifted(self) -> bool:
        """Take readings if they are due; return true if they changed the level."""
        if self.candidate is None or not self._is_due(self.candidate):
            return False
        found = self._read_until_agreement(self.candidate)
        sides = {self._side(each) for each in found}
        if sides in ({-1}, {1}) and len(found) == _AGREEING:
            self._move_to(found)
            return True
        if {-1, 1} <= sides:
            self.notes.append(f"at {self._now}, the machine's speed fluctuated: results are unreliable")
        self._steady.extend(each for each in found if self._is_near(each))
        return False

    def _is_due(self, candidate: Candidate) -> bool:
        """Return true if a reading is due and the budget allows it with two warm-ups."""
        is_time = self.trials.spent_s - self.readings[-1].spent_s >= _EVERY_S
        return is_time and self.affords(candidate, 2 * WARM_S + self._seconds)

    def _read_until_agreement(self, candidate: Candidate) -> list[Reading]:
        """Take readings until one agrees with the level; return an empty list if the reference fails."""
        found: list[Reading] = []
        while len(found) < _AGREEING and (not found or self.affords(candidate, self._seconds)):
            if isinstance(self._read(candidate, warms_up=not found), Failed):
                self.notes.append(
                    f"at {self._now}, the reference failed: the machine's speed was not monitored any more"
                )
                self.candidate = None
                return []
            found.append(self.readings[-1])
            if not self._side(found[-1]):
                break
        return found

    def _side(self, reading: Reading) -> int:
        """Return 1 if a reading is significantly above the level, -1 if below, otherwise 0."""
        above = reading.lowest > max(each.highest for each in self._steady)
        below = reading.highest < min(each.lowest for each in self._steady)
        return 0 if self._is_near(reading) else above - below

    def _is_near(self, reading: Reading) -> bool:
        return abs(reading.level / self.level - 1) <= TOLERANCE

    def _move_to(self, found: Sequence[Reading]) -> None:
        level = sum(each.level for each in found) / len(found)
        self.notes.append(
            f"at {self._now}, the machine's speed changed from {self.level:.0%} to {level:.0%}: measured again"
        )
        self.level = level
        self._steady.clear()
        self._steady.extend(found)
        self._epoch += 1

    def _read(self, candidate: Candidate, *, warms_up: bool) -> Measured | Failed:
        load = ClosedLoop(2 * candidate.number(INSTANCES) * max(1, candidate.number(MAX_BATCH_SIZE)))
        seed = self._seed * 1_000_000 + _SEEDS * _SEEDS // 2 + len(self.readings)
        warm = self.trials.measure(candidate, load, WARM_S, seed + _SEEDS) if warms_up else None
        outcome = warm if isinstance(warm, Failed) else self.trials.measure(candidate, load, self._seconds, seed)
        if isinstance(outcome, Measured):
            self._note_reading(outcome, load.callers)
        return outcome

    def _note_reading(self, outcome: Measured, callers: int) -> None:
        rates = _rates(outcome, callers)
        first = self.readings[0].rate if self.readings else rates.value
        levels = rates.scaled(1 / first) if first else Interval(1.0, 0.0, math.inf)
        self.readings.append(
            Reading(
                spent_s=self.trials.spent_s,
                rate=rates.value,
                level=levels.value or self.level,
                lowest=levels.lower,
                highest=levels.upper,
            )
        )


def _rates(outcome: Measured, callers: int) -> Interval:
    """Responses per second of callers in a closed loop, by Little's law."""
    mean_s, margin_s = outcome.latency.mean_s, outcome.latency.mean_margin_s
    most = callers / (mean_s - margin_s) if margin_s < mean_s else math.inf
    return Interval(callers / mean_s, callers / (mean_s + margin_s), most)
