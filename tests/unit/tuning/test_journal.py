"""The journal, recorded trials and budgets."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from tuned import exact

from graphkiln.tuning.candidate import ENGINE, Candidate
from graphkiln.tuning.journal import Journal, RecordedTrials, outcome_as_json, outcome_from_json
from graphkiln.tuning.statistics import Interval, Latency
from graphkiln.tuning.trials import Failed, LoadShape, Measured, OpenLoop, SessionTiming
from graphkiln_backend.graph.errors import MeasurementError

SUBJECT = {"model": "abc", "machine": {"cores": 2}}
EVENTS = [{"begun": number, "text": "ä" * number} for number in range(4)]


def write(path: Path) -> None:
    with Journal(path, SUBJECT) as journal:
        for event in EVENTS:
            journal.append(event)


def test_incomplete_last_line_is_dropped(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    write(path)
    content = path.read_bytes()
    for size in (*range(0, len(content), 5), len(content) - 1, len(content)):
        path.write_bytes(content[:size])
        whole = max(0, content[:size].count(b"\n") - 1)
        with Journal(path, SUBJECT) as journal:
            assert journal.events == EVENTS[:whole]
            journal.append({"after": size})
        with Journal(path, SUBJECT) as journal:
            assert journal.events == [*EVENTS[:whole], {"after": size}]


@pytest.mark.parametrize(
    ("subject", "what"),
    [
        ({**SUBJECT, "model": "other"}, 'model is "other", the journal\'s "abc"'),
        ({**SUBJECT, "target": "50 ms"}, 'target is "50 ms", the journal\'s null'),
    ],
)
def test_journal_of_another_search_is_refused_and_kept(tmp_path: Path, subject: dict[str, object], what: str) -> None:
    path = tmp_path / "journal"
    write(path)
    before = path.read_bytes()
    with pytest.raises(MeasurementError, match=f"belongs to another search: {what}"):
        Journal(path, subject)
    assert path.read_bytes() == before


@pytest.mark.parametrize("line", [b"{torn}\n", b"[1]\n", b"\xff\n"])
def test_damaged_line_is_reported(tmp_path: Path, line: bytes) -> None:
    path = tmp_path / "journal"
    write(path)
    first, rest = path.read_bytes().split(b"\n", 1)
    path.write_bytes(first + b"\n" + line + rest)
    with pytest.raises(MeasurementError, match="damaged at line 2"):
        Journal(path, SUBJECT)


def test_journal_is_locked(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    with Journal(path, SUBJECT), pytest.raises(MeasurementError, match="locked"):
        Journal(path, SUBJECT)
    write(path)  # both locks were released


def test_folder_is_no_journal(tmp_path: Path) -> None:
    with pytest.raises(MeasurementError, match=r"cannot be opened: Is a directory.*delete it"):
        Journal(tmp_path, SUBJECT)


def test_partly_written_line_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the next line would follow an incomplete one."""
    path, write_some = tmp_path / "journal", os.write
    rooms = [5, -1]

    def fill(descriptor: int, line: memoryview) -> int:
        room = rooms.pop(0)
        if room < 0:
            raise OSError(28, "No space left on device")
        return write_some(descriptor, line[:room])

    with Journal(path, SUBJECT) as journal:
        with monkeypatch.context() as patched:
            patched.setattr("os.write", fill)
            with pytest.raises(MeasurementError, match="No space left"):
                journal.append({"lost": 1})
        journal.append({"kept": 1})
    with Journal(path, SUBJECT) as journal:
        assert journal.events == [{"kept": 1}]


# Recorded trials.

CANDIDATE = Candidate.of({ENGINE: "onnxruntime"})


class Scripted:
    """Trials with scripted results; each takes two seconds."""

    def __init__(self, work: Callable[[], Measured | Failed] | None = None) -> None:
        self.calls, self.work = 0, work
        self.loads: list[LoadShape] = []

    def clock(self) -> float:
        return 2.0 * self.calls

    def probe(self, session: Candidate) -> SessionTiming | Failed:
        self.calls += 1
        return SessionTiming(batch_s={1: 0.01, 8: 0.05}, accuracy=str(session[ENGINE]))

    def measure(self, candidate: Candidate, load: LoadShape, seconds: float, seed: int) -> Measured | Failed:
        del candidate
        self.loads.append(load)
        self.calls += 1
        if self.work:
            return self.work()
        latency = Latency(count=seed, mean_s=1, p50_s=1, p99=Interval(1, 0, float("inf")))
        return Measured(latency=latency, throughput=Interval(1, 1, 1), seconds=seconds, memory_bytes=None)


def measure(path: Path, trials: Scripted, *loads: LoadShape) -> tuple[list[Measured | Failed], float]:
    with Journal(path, {}) as journal:
        recorded = RecordedTrials(trials, journal, trials.clock)
        return [recorded.measure(CANDIDATE, load, 5.0, 7) for load in loads], recorded.spent_s


def test_recorded_measurements_are_not_repeated(tmp_path: Path) -> None:
    first, _ = measure(tmp_path / "j", Scripted(), OpenLoop(5.0), OpenLoop(6.0))
    trials = Scripted()
    again, spent_s = measure(tmp_path / "j", trials, OpenLoop(5.0))
    assert again == first[:1]
    assert trials.calls == 0
    assert spent_s == 2.0, "only requested measurements are charged"


def test_measurement_that_killed_the_tuner_three_times_failed(tmp_path: Path) -> None:
    def die() -> Measured:
        raise SystemExit

    for _ in range(3):
        with pytest.raises(SystemExit):
            measure(tmp_path / "j", Scripted(die), OpenLoop(5.0))
    trials = Scripted(die)
    outcomes, _ = measure(tmp_path / "j", trials, OpenLoop(5.0))
    (failed,) = outcomes
    assert isinstance(failed, Failed)
    assert "killed 3 times" in failed.reason
    assert trials.calls == 0


def test_restart_of_the_server_after_a_kill_is_not_charged(tmp_path: Path) -> None:
    first = Scripted()
    measure(tmp_path / "j", first, OpenLoop(5.0), OpenLoop(6.0))
    assert first.loads == [OpenLoop(5.0), OpenLoop(6.0)]
    trials = Scripted()
    _, spent_s = measure(tmp_path / "j", trials, OpenLoop(5.0), OpenLoop(6.0), OpenLoop(7.0), OpenLoop(8.0))
    assert trials.loads == [OpenLoop(7.0), OpenLoop(7.0), OpenLoop(8.0)], "one warm-up"
    assert spent_s == 8.0, "as without the kill"


def test_failed_candidate_is_not_measured_under_another_load(tmp_path: Path) -> None:
    trials = Scripted(lambda: Failed(reason="under load, tritonserver was killed or crashed"))
    outcomes, spent_s = measure(tmp_path / "j", trials, OpenLoop(5.0), OpenLoop(6.0))
    assert outcomes == [Failed(reason="under load, tritonserver was killed or crashed")] * 2
    assert (trials.calls, spent_s) == (1, 2.0)


def test_passing_failure_is_retried_by_the_next_run(tmp_path: Path) -> None:
    for _ in range(5):
        trials = Scripted(lambda: Failed(reason="port 40001 (HTTP) is in use", passing=True))
        with Journal(tmp_path / "j", {}) as journal:
            recorded = RecordedTrials(trials, journal, trials.clock)
            outcomes = [recorded.measure(CANDIDATE, OpenLoop(5.0), 5.0, 7) for _ in range(2)]
        assert outcomes == [Failed(reason="port 40001 (HTTP) is in use", passing=True)] * 2
        assert trials.calls == 1, "once in each run"
    assert isinstance(measure(tmp_path / "j", Scripted(), OpenLoop(5.0))[0][0], Measured)


def test_error_of_the_tuner_is_no_failure(tmp_path: Path) -> None:
    def fail() -> Measured:
        raise OSError(28, "No space left on device")

    for _ in range(4):
        with pytest.raises(OSError, match="No space left"):
            measure(tmp_path / "j", Scripted(fail), OpenLoop(5.0))
    assert isinstance(measure(tmp_path / "j", Scripted(), OpenLoop(5.0))[0][0], Measured)


@pytest.mark.parametrize(
    "event",
    [
        {"done": {}, "took_s": 1},
        {"done": {}, "outcome": {"kind": "no"}},
    ],
)
def test_invalid_event_is_reported(tmp_path: Path, event: dict[str, object]) -> None:
    with Journal(tmp_path / "j", {}) as journal:
        journal.append(event)
        with pytest.raises(MeasurementError, match="damaged at line 2"):
            RecordedTrials(Scripted(), journal, lambda: 0.0)


# Outcomes as JSON, including infinite latencies.

ENDLESS = np.append(np.full(50, 0.01), [math.inf] * 10)
OUTCOMES = [
    Failed(reason="it hung"),
    SessionTiming(batch_s={1: 0.01, 8: 0.06}, accuracy="", accuracy_lost=None),
    SessionTiming(batch_s={1: 0.01}, accuracy="differs", accuracy_lost=0.01),
    Measured(latency=Latency.of(ENDLESS), throughput=Interval(5.0, 4.0, 6.0), seconds=3.0),
    Measured(
        latency=Latency.of(np.full(5, math.inf)),
        throughput=exact(0.0),
        seconds=3.0,
        errors={"ServerError": 5},
        server_cores=1.5,
        memory_bytes=1 << 30,
        energy_j=3.5,
        warning="busy",
    ),
]


@pytest.mark.parametrize("outcome", OUTCOMES)
def test_outcome_round_trip(outcome: SessionTiming | Measured | Failed) -> None:
    text = json.dumps(outcome_as_json(outcome), allow_nan=False)
    assert outcome_from_json(json.loads(text)) == outcome
