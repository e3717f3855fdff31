"""What the journal holds is not measured again, and what kills the tuner is left out in the end."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from graphkiln.tuning.candidate import ENGINE, Candidate
from graphkiln.tuning.journal import Journal, RecordedTrials
from graphkiln.tuning.statistics import Interval, Latency
from graphkiln.tuning.trials import Bare, ClosedLoop, Failed, LoadShape, Measured, OpenLoop
from graphkiln_backend.graph.errors import MeasurementError

CANDIDATE = Candidate.of({ENGINE: "onnxruntime"})


class Scripted:
    """Trials that count their calls and do what they are told; each takes two seconds."""

    def __init__(self, work: Callable[[], Measured | Failed] | None = None) -> None:
        self.calls, self.work = 0, work
        self.warmed: list[LoadShape] = []

    def clock(self) -> float:
        return 2.0 * self.calls

    def probe(self, session: Candidate) -> Bare | Failed:
        self.calls += 1
        return Bare(batch_s={1: 0.01, 8: 0.05}, accuracy=str(session[ENGINE]))

    def warm(self, candidate: Candidate, load: LoadShape) -> None:
        assert candidate == CANDIDATE
        self.warmed.append(load)
        self.calls += 1

    def measure(self, candidate: Candidate, load: LoadShape, seconds: float, seed: int) -> Measured | Failed:
        del candidate, load
        self.calls += 1
        if self.work:
            return self.work()
        latency = Latency(count=seed, mean_s=1, p50_s=1, p90_s=1, p99=Interval(1, 0, float("inf")), p999_s=1)
        return Measured(latency=latency, throughput=Interval(1, 1, 1), seconds=seconds, memory_bytes=None)


def measure(path: Path, trials: Scripted, *loads: LoadShape) -> tuple[list[Measured | Failed], float]:
    with Journal(path, {}) as journal:
        recorded = RecordedTrials(trials, journal, trials.clock)
        return [recorded.measure(CANDIDATE, load, 5.0, 7) for load in loads], recorded.spent_s


def test_the_same_question_is_asked_once(tmp_path: Path) -> None:
    trials = Scripted()
    outcomes, spent_s = measure(tmp_path / "j", trials, OpenLoop(5.0), OpenLoop(5.0), ClosedLoop(5))
    assert outcomes[0] == outcomes[1]
    assert trials.calls == 2
    assert spent_s == 4.0


def test_another_run_asks_only_what_is_new_and_spends_what_was_spent(tmp_path: Path) -> None:
    first, _ = measure(tmp_path / "j", Scripted(), OpenLoop(5.0), OpenLoop(6.0))
    trials = Scripted()
    again, spent_s = measure(tmp_path / "j", trials, OpenLoop(5.0))
    assert again == first[:1]
    assert trials.calls == 0
    assert spent_s == 2.0, "what was not asked for is not spent"


def test_probes_are_kept_too(tmp_path: Path) -> None:
    for expected in (1, 0):
        trials = Scripted()
        with Journal(tmp_path / "j", {}) as journal:
            bare = RecordedTrials(trials, journal, trials.clock).probe(CANDIDATE)
        assert bare == Bare(batch_s={1: 0.01, 8: 0.05}, accuracy="onnxruntime")
        assert trials.calls == expected


def test_a_measurement_in_which_the_tuner_died_three_times_has_failed(tmp_path: Path) -> None:
    def die() -> Measured:
        raise SystemExit

    for _ in range(3):
        with pytest.raises(SystemExit):
            measure(tmp_path / "j", Scripted(die), OpenLoop(5.0))
    trials = Scripted(die)
    outcomes, _ = measure(tmp_path / "j", trials, OpenLoop(5.0))
    (failed,) = outcomes
    assert isinstance(failed, Failed)
    assert failed.reason.startswith("the tuner died 3 times while it was measured")
    assert trials.calls == 0


def test_a_server_that_a_kill_took_is_warm_again_and_charged_to_nobody(tmp_path: Path) -> None:
    first = Scripted()
    measure(tmp_path / "j", first, OpenLoop(5.0), OpenLoop(6.0))
    assert first.warmed == []
    trials = Scripted()
    _, spent_s = measure(tmp_path / "j", trials, OpenLoop(5.0), OpenLoop(6.0), OpenLoop(7.0), OpenLoop(8.0))
    assert trials.warmed == [OpenLoop(7.0)], "once: from then on it runs"
    assert spent_s == 8.0, "as if nothing had happened"


def test_what_was_probed_since_is_started_again_as_ever(tmp_path: Path) -> None:
    for expected in ([], []):
        trials = Scripted()
        with Journal(tmp_path / "j", {}) as journal:
            recorded = RecordedTrials(trials, journal, trials.clock)
            recorded.measure(CANDIDATE, OpenLoop(5.0), 5.0, 7)
            recorded.probe(CANDIDATE)
            recorded.measure(CANDIDATE, OpenLoop(6.0 + trials.calls), 5.0, 7)
        assert trials.warmed == expected


def test_what_crashed_under_one_load_is_not_asked_about_another(tmp_path: Path) -> None:
    trials = Scripted(lambda: Failed(reason="under load, tritonserver was killed or crashed"))
    outcomes, spent_s = measure(tmp_path / "j", trials, OpenLoop(5.0), OpenLoop(6.0))
    assert outcomes == [Failed(reason="under load, tritonserver was killed or crashed")] * 2
    assert (trials.calls, spent_s) == (1, 2.0)


def test_stopping_it_by_hand_is_not_the_candidates_doing(tmp_path: Path) -> None:
    def stop() -> Measured:
        raise KeyboardInterrupt

    for _ in range(5):
        with pytest.raises(KeyboardInterrupt):
            measure(tmp_path / "j", Scripted(stop), OpenLoop(5.0))
    assert isinstance(measure(tmp_path / "j", Scripted(), OpenLoop(5.0))[0][0], Measured)


def test_what_the_machine_may_be_to_blame_for_is_tried_again_by_the_next_run(tmp_path: Path) -> None:
    for _ in range(5):
        trials = Scripted(lambda: Failed(reason="port 40001 (HTTP) is in use", passing=True))
        with Journal(tmp_path / "j", {}) as journal:
            recorded = RecordedTrials(trials, journal, trials.clock)
            outcomes = [recorded.measure(CANDIDATE, OpenLoop(5.0), 5.0, 7) for _ in range(2)]
        assert outcomes == [Failed(reason="port 40001 (HTTP) is in use", passing=True)] * 2
        assert trials.calls == 1, "once in each run"
    assert isinstance(measure(tmp_path / "j", Scripted(), OpenLoop(5.0))[0][0], Measured)


def test_what_a_candidate_does_wrong_is_not_tried_again(tmp_path: Path) -> None:
    measure(tmp_path / "j", Scripted(lambda: Failed(reason="no kernels")), OpenLoop(5.0))
    again = Scripted()
    assert measure(tmp_path / "j", again, OpenLoop(5.0))[0] == [Failed(reason="no kernels")]
    assert again.calls == 0


def test_an_error_of_the_tuner_is_not_the_candidates_doing(tmp_path: Path) -> None:
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
        {"other": 1},
        {"done": {}, "outcome": {"kind": "no"}},
        {},
    ],
)
def test_an_event_that_is_none_is_told_with_its_line(tmp_path: Path, event: dict[str, object]) -> None:
    with Journal(tmp_path / "j", {}) as journal:
        journal.append(event)
        with pytest.raises(MeasurementError, match="damaged at line 2"):
            RecordedTrials(Scripted(), journal, lambda: 0.0)
