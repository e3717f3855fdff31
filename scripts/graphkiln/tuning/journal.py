"""Journal of measurements, so that a search that was killed continues without measuring anything twice.

A search is deterministic: with the same results it requests the same measurements in the same order. The budget is
charged neither with the measurement that a kill interrupted nor with the second start of the server. Failures that the
machine may have caused are measured again by the next run.

The journal has one line of JSON for each event, synced to disk before the next event. The first line identifies the
search: a journal of another model, machine, space, target or format version is refused. A killed process leaves at most
one incomplete line at the end, which is dropped. Only one process at a time can open a journal.
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
from graphkiln.tuning.trials import WARM_S, Failed, LoadShape, Measured, SessionTiming, Trials
from graphkiln_backend.graph.errors import MeasurementError
from graphkiln_backend.graph.files import MIB, read_bytes
from graphkiln_backend.system.closing import Closeable
from graphkiln_backend.system.locks import try_lock

_VERSION = 2
_LIMIT = 256 * MIB


class Journal(Closeable):
    """An open and locked journal file.

    Args:
        path: The file; it and its folder are created if missing.
        subject: Identity of the search as JSON data with keys such as `model` and `machine`.

    Raises:
        MeasurementError: The journal is locked by another process, belongs to another search, is damaged or is not
            writable.
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
        """Write an event and sync it to disk.

        Raises:
            MeasurementError: The file cannot be written.
        """
        end = os.lseek(self._descriptor, 0, os.SEEK_END)
        left = memoryview(json.dumps(event, allow_nan=False).encode() + b"\n")
        try:
            while left:
                left = left[os.write(self._descriptor, left) :]
            os.fsync(self._descriptor)
        except OSError as error:
            os.ftruncate(self._descriptor, end)  # an incomplete line would damage the journal once there is space again
            os.lseek(self._descriptor, end, os.SEEK_SET)
            raise MeasurementError(
                f"{self.path} cannot be written: {error.strerror}",
                hint="free disk space, then run the same command to continue",
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
        lines = content.split(b"\n")[:-1]  # drops an incomplete last line
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
            hint="measurements are stored there: make it writable, or set XDG_CACHE_HOME to another folder",
        ) from error
    if not try_lock(descriptor):
        os.close(descriptor)
        raise MeasurementError(f"{path} is locked by a running search", hint="wait until it ends")
    return descriptor


def _sync_folder(path: Path) -> None:
    """Sync a folder, so that the name of a new file is on disk."""
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
    return MeasurementError(f"{path} {what}", hint="delete it to measure everything again")


# Number of remembered durations, of which the slowest counts: on a busy machine a server may start much slower than
# usual.
_REMEMBERED = 3
# Assumed seconds of a server start and of a warm-up before the first one.
_GUESS_S, _WARMUP_S = 5.0, 1.0
# Share of the budget reserved for the confirmation, and its minimum in seconds beside a server start.
_CONFIRMING, _CONFIRMED_S = 0.2, 8.0


class Budget:
    """Seconds for measurements, including the server starts that they need."""

    def __init__(self, total_s: float) -> None:
        self.total_s, self.spent_s = total_s, 0.0
        self._served: Candidate | None = None
        self._starts: deque[float] = deque(maxlen=_REMEMBERED)
        self._warmups: deque[float] = deque(maxlen=_REMEMBERED)
        self._probes: deque[float] = deque(maxlen=_REMEMBERED)

    @property
    def left_s(self) -> float:
        """Seconds left; negative after an overrun."""
        return self.total_s - self.spent_s

    @property
    def searching_s(self) -> float:
        """Seconds left without the reserve for the confirmation."""
        if math.isinf(self.total_s):
            return self.left_s
        return self.left_s - max(_CONFIRMING * self.total_s, self.start_s + _CONFIRMED_S)

    @property
    def start_s(self) -> float:
        """Seconds of overhead of a measurement that starts a server."""
        return max(self._starts, default=_GUESS_S)

    @property
    def probe_s(self) -> float:
        """Seconds of timing a session; 0 before the first."""
        return max(self._probes, default=0.0)

    def serves(self, candidate: Candidate) -> bool:
        """Return true if the candidate's server is running."""
        return candidate == self._served

    def needed_s(self, candidate: Candidate, seconds: float) -> float:
        """Return the seconds of a measurement with its overhead."""
        beside_s = max(self._warmups, default=_WARMUP_S) if self.serves(candidate) else self.start_s
        return beside_s + seconds

    def affords(self, candidate: Candidate, seconds: float) -> bool:
        """Return true if a measurement leaves enough for the confirmation."""
        return self.needed_s(candidate, seconds) <= self.searching_s

    def charge_probe(self, took_s: float) -> None:
        """Charge the timing of a session, which stops the running server."""
        self.spent_s += took_s
        self._served = None
        self._probes.append(took_s)

    def charge(self, candidate: Candidate, seconds: float, took_s: float, *, failed: bool = False) -> None:
        """Charge a measurement of `seconds` that took `took_s` with its overhead."""
        self.spent_s += took_s
        beside_s = max(0.0, took_s - seconds)
        if not failed:
            (self._warmups if self.serves(candidate) else self._starts).append(beside_s)
        self._served = None if failed else candidate


# A candidate has failed after killing the tuner this often in the same measurement, for example by filling the memory.
_MOST_DEATHS = 3

Outcome = SessionTiming | Measured | Failed
_Outcome = TypeVar("_Outcome", bound=Outcome)


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """A new measurement.

    Attributes:
        spent_s: Seconds of the budget spent before it.
        candidate: Candidate, or its session's keys.
        load: Load; None for a session without a server.
        outcome: Result.
    """

    spent_s: float
    candidate: Candidate
    load: LoadShape | None
    outcome: Outcome


Report = Callable[[Progress], None]


class RecordedTrials:
    """`Trials` that record the measurements of other `Trials` in a journal.

    Args:
        trials: Performs the measurements.
        journal: Earlier measurements; new ones are appended.
        clock: Monotonic clock in seconds.
        report: Called after each new measurement, not for those of the journal.

    Attributes:
        budget: Charged with each measurement of this or an earlier run, so that a continued search sees the same
            budget as the first time. Infinite until a search sets it.

    Raises:
        MeasurementError: The journal is damaged.
    """

    def __init__(
        self, trials: Trials, journal: Journal, clock: Callable[[], float], report: Report = lambda _: None
    ) -> None:
        self._trials, self._journal, self._clock, self._report = trials, journal, clock, report
        self._known: dict[str, tuple[Outcome, float]] = {}
        self._requested: set[str] = set()
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
        return len(self._requested)

    def probe(self, session: Candidate) -> SessionTiming | Failed:
        """See `Trials.probe`."""

        def work() -> SessionTiming | Failed:
            self._running = None  # no server runs while a session is timed
            return self._trials.probe(session)

        outcome, took_s, is_first = self._once({"probe": session.as_json()}, session, None, work)
        if is_first:
            self.budget.charge_probe(took_s)
        return outcome

    def measure(self, candidate: Candidate, load: LoadShape, seconds: float, seed: int) -> Measured | Failed:
        """See `Trials.measure`; a candidate that failed once fails under any load."""
        if candidate in self._failed:
            return self._failed[candidate]

        def work() -> Measured | Failed:
            return self._trials.measure(candidate, load, seconds, seed)

        def prepare() -> None:
            # Without the kill the server would still be running: its second start is not charged.
            if self.budget.serves(candidate) and self._running != candidate:
                self._trials.measure(candidate, load, WARM_S, 0)  # a failure shows again below
            self._running = candidate

        task = {"measure": candidate.as_json(), "load": asdict(load), "seconds": seconds, "seed": seed}
        outcome, took_s, is_first = self._once(task, candidate, load, work, prepare)
        if isinstance(outcome, Failed):
            self._failed[candidate] = outcome
        if is_first:
            self.budget.charge(candidate, seconds, took_s, failed=isinstance(outcome, Failed))
        return outcome

    def _once(
        self,
        task: dict[str, Any],
        candidate: Candidate,
        load: LoadShape | None,
        work: Callable[[], _Outcome | Failed],
        prepare: Callable[[], None] = lambda: None,
    ) -> tuple[_Outcome | Failed, float, bool]:
        """Return an outcome, its seconds, and true for the first request of this run."""
        key = _key(task)
        is_first = key not in self._requested
        self._requested.add(key)
        if key not in self._known:
            self._known[key] = new, _ = self._measure_anew(task, work, prepare)
            self._report(Progress(spent_s=self.spent_s, candidate=candidate, load=load, outcome=new))
        outcome: Any
        outcome, took_s = self._known[key]
        return outcome, took_s, is_first

    def _measure_anew(
        self, task: dict[str, Any], work: Callable[[], _Outcome | Failed], prepare: Callable[[], None]
    ) -> tuple[Outcome, float]:
        if (deaths := self._deaths[_key(task)]) >= _MOST_DEATHS:
            return self._finish(
                task, Failed(reason=f"the tuner was killed {deaths} times during this measurement"), 0.0
            )
        self._journal.append({"begun": task})
        try:
            prepare()
            begun_s = self._clock()
            outcome = work()
        except (KeyboardInterrupt, Exception):  # not the candidate's fault
            with suppress(MeasurementError):  # a full disk may be the cause
                self._journal.append({"interrupted": task})
            raise
        return self._finish(task, outcome, self._clock() - begun_s)

    def _finish(self, task: dict[str, Any], outcome: Outcome, seconds: float) -> tuple[Outcome, float]:
        """Append an outcome, and return it as a later run will read it."""
        kept = outcome_as_json(outcome)
        self._journal.append({"done": task, "took_s": seconds, "outcome": kept})
        return outcome_from_json(kept), seconds

    def _read_events(self) -> None:
        """Load measurements of earlier runs, and count those during which the tuner was killed."""
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


_KINDS: dict[str, type[Outcome]] = {"bare": SessionTiming, "measured": Measured, "failed": Failed}
# Fields that may be infinite, which is null in JSON; no other field of theirs may be null.
_ENDLESS = ("value", "lower", "upper", "mean_s", "p50_s", "p99_wide_s", "mean_margin_s")


def outcome_as_json(outcome: Outcome) -> dict[str, Any]:
    """Convert an outcome to JSON data with its type as `kind`."""
    kind = next(name for name, each in _KINDS.items() if isinstance(outcome, each))
    data: dict[str, Any] = finite({"kind": kind, **asdict(outcome)})
    return data


def outcome_from_json(data: Mapping[str, Any]) -> Outcome:
    """Convert the output of `outcome_as_json` back to an outcome.

    Raises:
        KeyError: A field is missing, or the kind is unknown.
        TypeError: A field has the wrong type.
    """
    values = {key: value for key, value in data.items() if key != "kind"}
    kind = _KINDS[data["kind"]]
    if kind is SessionTiming:
        return SessionTiming(
            **values | {"batch_s": {int(size): float(each) for size, each in values["batch_s"].items()}}
        )
    if kind is Measured:
        latency = _endless(values["latency"]) | {"p99": Interval(**_endless(values["latency"]["p99"]))}
        through = Interval(**_endless(values["throughput"]))
        return Measured(**values | {"latency": Latency(**latency), "throughput": through})
    return Failed(**values)


def _endless(data: Mapping[str, Any]) -> dict[str, Any]:
    return {name: math.inf if value is None and name in _ENDLESS else value for name, value in data.items()}
