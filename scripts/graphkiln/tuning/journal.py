"""Trials with a journal: a measurement that it holds is not repeated, and the time that it took counts as spent.

A search asks for the same measurements in the same order whenever it gets the same outcomes, so that one that was
killed continues where it was. The budget is charged neither with the measurement that a kill cut off nor with the
second start of the server. Failures that the machine may have caused are measured again by the next run.

The journal is one line of JSON for each event, on the disk before the next one begins. The first line identifies the
search: a journal of another model, machine, space, target or version of the format is refused. A process that dies
leaves at most one torn line, the last, which is dropped. One process at a time has a journal open.
"""

from __future__ import annotations

import json
import math
import os
from collections import Counter, deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

from graphkiln.reporting.json_text import finite
from graphkiln.tuning.candidate import Candidate
from graphkiln.tuning.statistics import Interval, Latency
from graphkiln.tuning.trials import WARM_S, Bare, Failed, LoadShape, Measured, Trials
from graphkiln_backend.graph.errors import MeasurementError
from graphkiln_backend.graph.files import MIB, read_bytes
from graphkiln_backend.system.closing import Closeable
from graphkiln_backend.system.locks import try_lock

_VERSION = 1
_LIMIT = 256 * MIB


class Journal(Closeable):
    """An open and locked journal.

    Args:
        path: The file; it and its folder are created if missing.
        subject: Identity of the search, as JSON data by readable names such as `model` and `machine`.

    Raises:
        MeasurementError: Another process has it open, it belongs to another search, it is damaged, or it cannot be
            written.
    """

    def __init__(self, path: Path, subject: Mapping[str, Any]) -> None:
        self.path = path
        self.events: list[dict[str, Any]] = []
        self._descriptor = _open_locked(path)
        try:
            self._read({"version": _VERSION, **subject})
        except BaseException:
            os.close(self._descriptor)
            raise

    def append(self, event: Mapping[str, Any]) -> None:
        """Write an event; it is on the disk when this returns.

        Raises:
            MeasurementError: It cannot be written.
        """
        end = os.lseek(self._descriptor, 0, os.SEEK_END)
        left = memoryview(json.dumps(event, allow_nan=False).encode() + b"\n")
        try:
            while left:
                left = left[os.write(self._descriptor, left) :]
            os.fsync(self._descriptor)
        except OSError as error:
            os.ftruncate(self._descriptor, end)  # half a line would be damage in the middle once there is room again
            os.lseek(self._descriptor, end, os.SEEK_SET)
            raise MeasurementError(
                f"{self.path} cannot be written: {error.strerror}", hint="make room; then the same command goes on"
            ) from error
        self.events.append(dict(event))

    def close(self) -> None:
        """Release the lock."""
        os.close(self._descriptor)

    def _read(self, subject: Mapping[str, Any]) -> None:
        try:
            content = read_bytes(self.path, _LIMIT)
        except OSError as error:
            raise _unusable(self.path, f"cannot be read: {error}") from error
        lines = content.split(b"\n")[:-1]  # what follows the last newline is torn
        os.ftruncate(self._descriptor, sum(len(line) + 1 for line in lines))
        if not lines:
            self.append(subject)
            _sync_folder(self.path.parent)
        else:
            self.events = [_parse(self.path, number, line) for number, line in enumerate(lines, 1)]
            _check_subject(self.path, self.events[0], json.loads(json.dumps(subject)))
        del self.events[0]


def _open_locked(path: Path) -> int:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK, 0o644)
    except IsADirectoryError as error:
        raise _unusable(path, f"cannot be opened: {error.strerror}") from error
    except OSError as error:
        raise MeasurementError(
            f"{path} cannot be opened: {error.strerror}",
            hint="measurements are kept there: make it writable, or set XDG_CACHE_HOME to another folder",
        ) from error
    if not try_lock(descriptor):
        os.close(descriptor)
        raise MeasurementError(f"{path} is another search's that runs now", hint="wait until it ends")
    return descriptor


def _sync_folder(path: Path) -> None:
    """Put the name of a new file on the disk, too."""
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _parse(path: Path, number: int, line: bytes) -> dict[str, Any]:
    try:
        event = json.loads(line)
    except ValueError as error:
        raise _unusable(path, f"is damaged at line {number}: {error}") from error
    if not isinstance(event, dict):
        raise _unusable(path, f"is damaged at line {number}: expected an object")
    return event


def _check_subject(path: Path, found: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    differing = [key for key in sorted({*found, *expected}) if found.get(key) != expected.get(key)]
    if differing:
        key = differing[0]
        others = f", and {', '.join(differing[1:])}" if differing[1:] else ""
        ours, theirs = (json.dumps(each.get(key))[:80] for each in (expected, found))
        raise _unusable(path, f"belongs to another search: {key} is {ours}, the journal's {theirs}{others}")


def _unusable(path: Path, what: str) -> MeasurementError:
    return MeasurementError(f"{path} {what}", hint="delete it: all is measured anew")


# Measurements whose durations are remembered; the slowest of them counts: on a busy machine a start takes many times
# what the measurement does.
_REMEMBERED = 3
# Guesses of a start and of a warm-up, before there was one.
_GUESS_S, _WARMUP_S = 5.0, 1.0
# Share of the budget that is kept for the confirmation, and seconds that it takes at least beside a start.
_CONFIRMING, _CONFIRMED_S = 0.2, 8.0


class Budget:
    """Seconds that measurements may take: their own, and those of the servers that they start."""

    def __init__(self, total_s: float) -> None:
        self.total_s, self.spent_s = total_s, 0.0
        self._served: Candidate | None = None
        self._starts: deque[float] = deque(maxlen=_REMEMBERED)
        self._warmups: deque[float] = deque(maxlen=_REMEMBERED)
        self._probes: deque[float] = deque(maxlen=_REMEMBERED)

    @property
    def left_s(self) -> float:
        """Seconds left; negative if it was overrun."""
        return self.total_s - self.spent_s

    @property
    def searching_s(self) -> float:
        """Seconds left for all but the confirmation."""
        if math.isinf(self.total_s):
            return self.left_s
        return self.left_s - max(_CONFIRMING * self.total_s, self.start_s + _CONFIRMED_S)

    @property
    def start_s(self) -> float:
        """Overhead of a measurement that starts a server."""
        return max(self._starts, default=_GUESS_S)

    @property
    def probe_s(self) -> float:
        """Seconds of a bare session; 0 before the first."""
        return max(self._probes, default=0.0)

    def serves(self, candidate: Candidate) -> bool:
        """Return true if a candidate's server runs."""
        return candidate == self._served

    def needed_s(self, candidate: Candidate, seconds: float) -> float:
        """Seconds of a measurement with its overhead."""
        beside_s = max(self._warmups, default=_WARMUP_S) if self.serves(candidate) else self.start_s
        return beside_s + seconds

    def affords(self, candidate: Candidate, seconds: float) -> bool:
        """Return true if a measurement leaves enough for the confirmation."""
        return self.needed_s(candidate, seconds) <= self.searching_s

    def charge_probe(self, took_s: float) -> None:
        """Charge a bare session; the running server was stopped for it."""
        self.spent_s += took_s
        self._served = None
        self._probes.append(took_s)

    def charge(self, candidate: Candidate, seconds: float, took_s: float, *, failed: bool = False) -> None:
        """Charge a measurement of so many seconds, which took longer than that."""
        self.spent_s += took_s
        beside_s = max(0.0, took_s - seconds)
        if not failed:
            (self._warmups if self.serves(candidate) else self._starts).append(beside_s)
        self._served = None if failed else candidate


# Deaths of the tuner in one measurement after which its candidate has failed: a candidate can take the tuner with it
# when it fills the memory.
_MOST_DEATHS = 3

Outcome = Bare | Measured | Failed
_Outcome = TypeVar("_Outcome", bound=Outcome)


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """A measurement that has just been made.

    Attributes:
        number: Its number, those of earlier runs of the command included.
        spent_s: Seconds of the budget before it.
        candidate: The candidate, or its session alone.
        load: The load; None for a bare session.
        outcome: The result.
    """

    number: int
    spent_s: float
    candidate: Candidate
    load: LoadShape | None
    outcome: Outcome


Report = Callable[[Progress], None]


class RecordedTrials:
    """`Trials` on top of others, with a journal.

    Args:
        trials: Trials that measure.
        journal: Earlier measurements; new ones are appended.
        clock: Seconds since any moment.
        report: Called after each measurement that is made, not for those of the journal.

    Attributes:
        budget: Charged with each measurement, whether it was made now or by an earlier run: a search that goes on sees
            its budget shrink as it did the first time. Infinite until a search sets it.

    Raises:
        MeasurementError: The journal is damaged.
    """

    def __init__(
        self, trials: Trials, journal: Journal, clock: Callable[[], float], report: Report = lambda _: None
    ) -> None:
        self._trials, self._journal, self._clock, self._report = trials, journal, clock, report
        self._known: dict[str, tuple[Outcome, float]] = {}
        self._asked: set[str] = set()
        self._failed: dict[Candidate, Failed] = {}
        self._deaths: Counter[str] = Counter()
        self._running: Candidate | None = None
        self.budget = Budget(math.inf)
        self._read_events()

    @property
    def spent_s(self) -> float:
        """Seconds of all measurements so far."""
        return self.budget.spent_s

    @property
    def count(self) -> int:
        """Number of measurements so far."""
        return len(self._asked)

    def probe(self, session: Candidate) -> Bare | Failed:
        """See `Trials.probe`."""

        def work() -> Bare | Failed:
            self._running = None  # no server runs while a bare session is timed
            return self._reported(session, None, self._trials.probe(session))

        outcome, took_s, is_first = self._once({"probe": session.as_json()}, work)
        if is_first:
            self.budget.charge_probe(took_s)
        return outcome

    def measure(self, candidate: Candidate, load: LoadShape, seconds: float, seed: int) -> Measured | Failed:
        """See `Trials.measure`; a candidate that failed once has failed under any load."""
        if candidate in self._failed:
            return self._failed[candidate]

        def work() -> Measured | Failed:
            return self._reported(candidate, load, self._trials.measure(candidate, load, seconds, seed))

        def prepare() -> None:
            # The server would still run, had the tuner not died since: its second start is not charged.
            if self.budget.serves(candidate) and self._running != candidate:
                self._trials.measure(candidate, load, WARM_S, 0)  # what fails fails again below
            self._running = candidate

        task = {"measure": candidate.as_json(), "load": asdict(load), "seconds": seconds, "seed": seed}
        outcome, took_s, is_first = self._once(task, work, prepare)
        if isinstance(outcome, Failed):
            self._failed[candidate] = outcome
        if is_first:
            self.budget.charge(candidate, seconds, took_s, failed=isinstance(outcome, Failed))
        return outcome

    def _reported(self, candidate: Candidate, load: LoadShape | None, outcome: _Outcome) -> _Outcome:
        progress = Progress(number=self.count, spent_s=self.spent_s, candidate=candidate, load=load, outcome=outcome)
        self._report(progress)
        return outcome

    def _once(
        self, task: dict[str, Any], work: Callable[[], _Outcome | Failed], prepare: Callable[[], None] = lambda: None
    ) -> tuple[_Outcome | Failed, float, bool]:
        """Return an outcome, the seconds that it took, and whether this run asks for it for the first time."""
        key = _key(task)
        is_first = key not in self._asked
        self._asked.add(key)
        if key not in self._known:
            self._known[key] = self._measure_anew(task, work, prepare)
        outcome: Any
        outcome, took_s = self._known[key]
        return outcome, took_s, is_first

    def _measure_anew(
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
        """Append an outcome, and return it as another run will read it."""
        kept = outcome_as_json(outcome)
        self._journal.append({"done": task, "took_s": seconds, "outcome": kept})
        return outcome_from_json(kept), seconds

    def _read_events(self) -> None:
        """Take up measurements of earlier runs, and count those that the tuner died in."""
        begun = ""
        for number, event in enumerate(self._journal.events, 2):
            try:
                if "begun" in event:
                    self._deaths[begun] += 1
                    begun = _key(event["begun"])
                    continue
                begun = ""
                if "interrupted" not in event:
                    outcome = outcome_from_json(event["outcome"])
                    if not (isinstance(outcome, Failed) and outcome.passing):
                        self._known[_key(event["done"])] = outcome, float(event["took_s"])
            except (KeyError, TypeError, ValueError, AttributeError) as error:
                raise _unusable(self._journal.path, f"is damaged at line {number}: {error!r}") from error
        self._deaths[begun] += 1
        del self._deaths[""]


def _key(task: dict[str, Any]) -> str:
    return json.dumps(task, sort_keys=True)


_KINDS: dict[str, type[Outcome]] = {"bare": Bare, "measured": Measured, "failed": Failed}
# Fields that may be infinite, which JSON writes as null; no other field of theirs may be null.
_ENDLESS = ("value", "lower", "upper", "mean_s", "p50_s", "p90_s", "p999_s", "p99_wide_s", "mean_margin_s")


def outcome_as_json(outcome: Outcome) -> dict[str, Any]:
    """An outcome as JSON data, its kind under `kind`."""
    kind = next(name for name, each in _KINDS.items() if isinstance(outcome, each))
    data: dict[str, Any] = finite({"kind": kind, **asdict(outcome)})
    return data


def outcome_from_json(data: Mapping[str, Any]) -> Outcome:
    """Read what `outcome_as_json` wrote.

    Raises:
        KeyError: A field is missing, or the kind is unknown.
        TypeError: A field is of another kind.
    """
    values = {key: value for key, value in data.items() if key != "kind"}
    kind = _KINDS[data["kind"]]
    if kind is Bare:
        return Bare(**values | {"batch_s": {int(size): float(each) for size, each in values["batch_s"].items()}})
    if kind is Measured:
        latency = _endless(values["latency"]) | {"p99": Interval(**_endless(values["latency"]["p99"]))}
        through = Interval(**_endless(values["throughput"]))
        return Measured(**values | {"latency": Latency(**latency), "throughput": through})
    return Failed(**values)


def _endless(data: Mapping[str, Any]) -> dict[str, Any]:
    return {name: math.inf if value is None and name in _ENDLESS else value for name, value in data.items()}
