"""Trials with fake servers, and timing of sessions in child processes."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from graphkiln.story.server import LocalServer, PortTaken
from graphkiln.tuning import local_trials
from graphkiln.tuning.candidate import Candidate, Value
from graphkiln.tuning.local_trials import LocalTrials, ProbeJob, accuracy_lost, check_placement, probe_session, run_job
from graphkiln.tuning.measure import Loading, Placed, ServedCandidate
from graphkiln.tuning.requests import Requests
from graphkiln.tuning.subject import Subject
from graphkiln.tuning.trials import Failed, OpenLoop, SessionTiming
from graphkiln_backend.graph.errors import ConnectionFailed, MeasurementError
from graphkiln_backend.repository.config import read_config

FIRST, SECOND = (Candidate.of({"engine": "onnxruntime", "max_batch_size": size}) for size in (4, 8))
SERVES = Placed(engine="onnxruntime", precision="fp32", device="cpu")

OTHER = Placed(engine="openvino", precision="fp32", device="cpu")


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Starts, loads and stops of servers, in order."""
    found: list[str] = []

    @contextmanager
    def start(store: Path, **options: Any) -> Iterator[LocalServer]:
        size = read_config(store / "digits" / "config.pbtxt").max_batch_size
        if size == 13:
            raise MeasurementError("digits: no room")
        assert options["deadline_s"] == 180
        found.append(f"start {size}")
        try:
            yield LocalServer(http_url="http://h:1", grpc_url="grpc://h:2", pid=1, metrics_url="http://h:3")
        finally:
            found.append(f"stop {size}")

    monkeypatch.setattr(local_trials, "start_server", start)
    monkeypatch.setattr(local_trials, "read_placement", lambda _url, _model: (SERVES,))
    monkeypatch.setattr(local_trials, "ServerWatch", lambda _pid: None)
    monkeypatch.setattr(ServedCandidate, "measure", lambda _self, load, _s, _seed: found.append(f"load {load.rate}"))
    return found


@pytest.fixture
def trials(subject: Subject, requests: Requests) -> Iterator[LocalTrials]:
    with LocalTrials(subject=subject, loading=Loading(requests=requests), batch_sizes=(1, 4)) as open_:
        yield open_


def test_one_server_for_all_loads_of_a_candidate(trials: LocalTrials, events: list[str]) -> None:
    for candidate, rate in ((FIRST, 1), (FIRST, 2), (SECOND, 3)):
        trials.measure(candidate, OpenLoop(rate), 1, 0)
    trials.close()
    assert events == ["start 4", "load 1", "load 2", "stop 4", "start 8", "load 3", "stop 8"]


def test_metrics_may_be_available_later(
    trials: LocalTrials, events: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    answers: list[Any] = [ConnectionFailed("refused"), (), (SERVES,)]

    def read(_url: str, _model: str) -> Any:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(local_trials, "read_placement", read)
    monkeypatch.setattr(local_trials, "_POLL_S", 0)
    trials.measure(FIRST, OpenLoop(1), 1, 0)
    assert (answers, events) == ([], ["start 4", "load 1"])


def test_candidate_that_does_not_load(trials: LocalTrials, events: list[str]) -> None:
    found = trials.measure(FIRST.with_values({"max_batch_size": 13}), OpenLoop(1), 1, 0)
    assert found == Failed(reason="digits: no room")
    trials.measure(FIRST, OpenLoop(1), 1, 0)
    assert events == ["start 4", "load 1"]


def test_port_in_use_is_a_passing_failure(trials: LocalTrials, monkeypatch: pytest.MonkeyPatch) -> None:
    def start(_store: Path, **_: Any) -> Any:
        raise PortTaken("the server ended with code 2: ERROR port 40001 (HTTP) is in use")

    monkeypatch.setattr(local_trials, "start_server", start)
    found = trials.measure(FIRST, OpenLoop(1), 1, 0)
    assert isinstance(found, Failed)
    assert found.passing


def test_server_is_stopped_after_a_failure(
    trials: LocalTrials, events: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ServedCandidate, "measure", lambda *_: Failed(reason="wrong"))
    assert trials.measure(FIRST, OpenLoop(1), 1, 0) == Failed(reason="wrong")
    assert events == ["start 4", "stop 4"]


def test_ctrl_c_stops_the_server(trials: LocalTrials, events: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(ServedCandidate, "measure", interrupt)
    with pytest.raises(KeyboardInterrupt), trials:
        trials.measure(FIRST, OpenLoop(1), 1, 0)
    assert events == ["start 4", "stop 4"]


def test_server_is_stopped_before_a_session_is_timed(
    trials: LocalTrials, events: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs: list[Any] = []
    timing = SessionTiming(batch_s={1: 0.001})
    monkeypatch.setattr(local_trials, "probe_session", lambda job, deadline_s: jobs.append((job, deadline_s)) or timing)
    trials.measure(FIRST, OpenLoop(1), 1, 0)
    assert trials.probe(FIRST) == timing
    assert events[-1] == "stop 4"
    ((job, deadline_s),) = jobs
    assert (job.batch_sizes, job.session, deadline_s) == ((1, 4), FIRST, 180)


class TestPlacement:
    @pytest.mark.parametrize(
        ("values", "placed", "reason"),
        [
            ({"engine": "openvino"}, [SERVES], "requested engine openvino"),
            ({"precision": "bf16"}, [SERVES], "requested precision bf16"),
            ({"engine": "onnxruntime"}, [], "does not report"),
            ({"engine": "onnxruntime"}, [SERVES, OTHER], "openvino"),
        ],
    )
    def test_other_placement_is_refused(self, values: dict[str, str], placed: list[Placed], reason: str) -> None:
        with pytest.raises(MeasurementError, match=reason):
            check_placement(Candidate.of(values), tuple(placed))

    @pytest.mark.parametrize(
        ("values", "precision"),
        [
            ({"engine": "auto"}, "fp32"),
            ({"precision": "tf32"}, "fp32"),
            ({"precision": "int8"}, "fp32"),
            ({"precision": "fp32"}, "unknown"),
        ],
    )
    def test_acceptable_placement(self, values: dict[str, str], precision: str) -> None:
        check_placement(Candidate.of(values), (Placed(engine="onnxruntime", precision=precision, device="cpu"),))


# Sessions without a server.

VALUES: dict[str, Value] = {"engine": "onnxruntime", "precision": "fp32", "threads": 1, "streams": 1, "spin": False}


def job(subject: Subject, requests: Requests, **values: Value) -> ProbeJob:
    session = Candidate.of({**VALUES, **values})
    return ProbeJob(subject=subject, session=session, batch_sizes=(1, 8), requests=requests)


def test_session_is_timed_and_checked(subject: Subject, requests: Requests) -> None:
    found = run_job(job(subject, requests))
    assert isinstance(found, SessionTiming)
    assert set(found.batch_s) == {1, 8}
    assert 0 < found.batch_s[1] < found.batch_s[8] * 2
    assert found.accuracy == ""
    assert found.accuracy_lost is None


def test_lost_accuracy_counts_labelled_samples(requests: Requests) -> None:
    """All reference answers are correct, and one of four answers of the session."""
    best = [int(answer["OUTPUT_0"].argmax()) for answer in requests.answers]
    labelled = replace(requests, targets=np.array(best))
    shuffled = [requests.answers[0], *(requests.answers[0],) * 3]
    lost = accuracy_lost(labelled, shuffled)
    assert lost == pytest.approx(1 - np.mean([each == best[0] for each in best]))
    assert accuracy_lost(requests, shuffled) is None


def test_crashed_session_fails(subject: Subject, requests: Requests, monkeypatch: pytest.MonkeyPatch) -> None:
    replace_process(monkeypatch, "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)")
    found = probe_session(job(subject, requests), 60)
    assert isinstance(found, Failed)
    assert "crashed the process that built it (SIGSEGV)" in found.reason


def test_hanging_session_is_killed(subject: Subject, requests: Requests, monkeypatch: pytest.MonkeyPatch) -> None:
    replace_process(monkeypatch, "import time; time.sleep(600)")
    found = probe_session(job(subject, requests), 0.3)
    assert isinstance(found, Failed)
    assert "within 0.3 s" in found.reason


def replace_process(monkeypatch: pytest.MonkeyPatch, program: str) -> None:
    start = subprocess.Popen

    def other(_: Any, **options: Any) -> Any:
        return start([sys.executable, "-c", program], **options)

    monkeypatch.setattr(local_trials.subprocess, "Popen", other)


@pytest.mark.parametrize(
    ("error", "reason"), [(OSError(28, "No space left on device"), "No space left"), (MemoryError(), "enough memory")]
)
def test_full_disk_and_low_memory_fail(
    subject: Subject, requests: Requests, monkeypatch: pytest.MonkeyPatch, error: Exception, reason: str
) -> None:
    def fail(*_: Any) -> Any:
        raise error

    monkeypatch.setattr(local_trials, "read_subject", fail)
    found = run_job(job(subject, requests))
    assert isinstance(found, Failed)
    assert reason in found.reason


# Passing failures.


@pytest.fixture
def vmstat(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "vmstat"
    path.write_text("nr_free_pages 5\noom_kill 3\nnr_dirty 0\n")
    monkeypatch.setattr(local_trials, "_VMSTAT", path)
    return path


@pytest.mark.usefixtures("vmstat")
def test_failures_of_the_machine_are_passing() -> None:
    reason = "digits: [Errno 28] No space left on device: '/tmp/x'"
    found = local_trials.excused(Failed(reason=reason), 3)
    assert found.passing
    assert found.reason == f"{reason}; run the same command again to retry it"


def test_failure_after_out_of_memory_is_passing(vmstat: Path) -> None:
    before = local_trials.oom_kills()
    assert before == 3
    vmstat.write_text("oom_kill 4\n")
    found = local_trials.excused(Failed(reason="under load, tritonserver was killed or crashed"), before)
    assert found.passing
    assert "memory was short" in found.reason


@pytest.mark.usefixtures("vmstat")
def test_failures_of_the_candidate_are_final() -> None:
    failed = Failed(reason="wrong answers under load")
    assert local_trials.excused(failed, 3) == failed
