"""A session without a server, in a process of its own."""

from __future__ import annotations

import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from digits_subject import digits_subject

from graphkiln.tuning import local_trials
from graphkiln.tuning.candidate import Candidate, Value
from graphkiln.tuning.local_trials import BareJob, accuracy_lost, probe_session, run_job
from graphkiln.tuning.questions import Questions, read_questions
from graphkiln.tuning.subject import Subject
from graphkiln.tuning.trials import Bare, Failed

VALUES: dict[str, Value] = {"engine": "onnxruntime", "precision": "fp32", "threads": 1, "streams": 1, "spin": False}


@pytest.fixture(scope="module")
def subject(repository: Path) -> Subject:
    return digits_subject(repository)


@pytest.fixture(scope="module")
def questions(subject: Subject) -> Questions:
    return read_questions(subject)


def job(subject: Subject, questions: Questions, floor: float | None = None, **values: Value) -> BareJob:
    session = Candidate.of({**VALUES, **values})
    return BareJob(subject=subject, session=session, batch_sizes=(1, 8), questions=questions, floor=floor)


def test_a_session_is_timed_and_judged(subject: Subject, questions: Questions) -> None:
    found = run_job(job(subject, questions))
    assert isinstance(found, Bare)
    assert set(found.batch_s) == {1, 8}
    assert 0 < found.batch_s[1] < found.batch_s[8] * 2
    assert found.accuracy == ""
    assert found.accuracy_lost is None


def test_what_no_engine_does_fails_with_the_reason(subject: Subject, questions: Questions) -> None:
    found = run_job(job(subject, questions, precision="bf16"))
    assert isinstance(found, Failed)
    assert "no bf16 kernels" in found.reason


def test_wrong_answers_are_told(subject: Subject, questions: Questions) -> None:
    wrong = replace(questions, answers=tuple(reversed(questions.answers)))
    found = run_job(job(subject, wrong))
    assert isinstance(found, Bare)
    assert "OUTPUT_0" in found.accuracy


def test_a_floor_counts_labelled_samples(subject: Subject, questions: Questions) -> None:
    """The reference is said to be right everywhere; of the answers that come, one of four is."""
    best = [int(answer["OUTPUT_0"].argmax()) for answer in questions.answers]
    labelled = replace(questions, targets=np.array(best))
    shuffled = [questions.answers[0], *(questions.answers[0],) * 3]
    lost = accuracy_lost(labelled, shuffled)
    assert lost == pytest.approx(1 - np.mean([each == best[0] for each in best]))
    assert accuracy_lost(questions, shuffled) is None
    judged = local_trials._judged(job(subject, labelled, floor=0.1), {1: 1.0}, shuffled)
    assert judged.accuracy
    assert judged.accuracy_lost == lost


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "ended the process that built it (SIGSEGV)"),
        ("import sys; sys.exit(3)", "ended the process that built it (exit code 3)"),
    ],
)
def test_a_process_that_dies_is_a_candidate_that_failed(
    subject: Subject, questions: Questions, program: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    replace_process(monkeypatch, program)
    found = probe_session(job(subject, questions), 60)
    assert isinstance(found, Failed)
    assert reason in found.reason


def test_one_that_hangs_is_killed(subject: Subject, questions: Questions, monkeypatch: pytest.MonkeyPatch) -> None:
    replace_process(monkeypatch, "import time; time.sleep(600)")
    before = threading.active_count()
    found = probe_session(job(subject, questions), 0.3)
    assert isinstance(found, Failed)
    assert "within 0.3 s" in found.reason
    assert threading.active_count() == before


def replace_process(monkeypatch: pytest.MonkeyPatch, program: str) -> None:
    start = subprocess.Popen

    def other(_: Any, **options: Any) -> Any:
        return start([sys.executable, "-c", program], **options)

    monkeypatch.setattr(local_trials.subprocess, "Popen", other)


@pytest.mark.parametrize(
    ("error", "reason"), [(OSError(28, "No space left on device"), "No space left"), (MemoryError(), "enough memory")]
)
def test_what_the_machine_lacks_is_a_reason(
    subject: Subject, questions: Questions, monkeypatch: pytest.MonkeyPatch, error: Exception, reason: str
) -> None:
    def fail(*_: Any) -> Any:
        raise error

    monkeypatch.setattr(local_trials, "read_subject", fail)
    found = run_job(job(subject, questions))
    assert isinstance(found, Failed)
    assert reason in found.reason


def test_it_ends_with_the_tuner(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a tuner that is killed nobody is left who would end a session that hangs."""
    done: list[str] = []
    monkeypatch.setattr(local_trials, "end_with_parent", lambda: done.append("bound"))
    monkeypatch.setattr(local_trials.signal, "signal", lambda *_: None)
    monkeypatch.setattr(local_trials, "hear", lambda _: done.append("heard"))
    monkeypatch.setattr(local_trials, "run_job", lambda _: None)
    monkeypatch.setattr(local_trials, "tell", lambda *_: done.append("told"))
    local_trials.main()
    assert done == ["bound", "heard", "told"]
