"""Runs from Python and their records."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from score_events import FACTS, PLANNED, RUN, Clock

import graphkiln
from graphkiln.scoring import running as records
from graphkiln.scoring import score
from graphkiln.scoring.metrics import RunMetrics
from graphkiln.scoring.run_state import Progress, RunState
from graphkiln.scoring.running import NOTE, RunRecord, describe_run
from graphkiln_backend.lowering.settings import Override
from graphkiln_backend.scoring import driver as backend_run
from graphkiln_backend.scoring.destinations.base import Destination
from graphkiln_backend.scoring.destinations.lock import NAME as LOCK
from graphkiln_backend.scoring.destinations.lock import Lock
from graphkiln_backend.scoring.driver import WriteNotes
from graphkiln_backend.scoring.errors import LockLost, RunInterrupted, ScoringError
from graphkiln_backend.scoring.messages import Event, Report, ScoreRequest
from graphkiln_backend.scoring.plan import open_destination

Play = Callable[..., list[ScoreRequest]]


@pytest.fixture
def play(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Play:
    """Replace the backend's run by one that reports given events; the function returns its requests."""
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "a.png").write_bytes(b"")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("graphkiln.scoring.metrics.ray_registry", lambda: None)

    def prepare(events: tuple[Event, ...] = RUN, error: BaseException | None = None) -> list[ScoreRequest]:
        requests: list[ScoreRequest] = []

        def run(request: ScoreRequest, report: Report, write_notes: WriteNotes) -> None:
            requests.append(request)
            Path(request.destination).mkdir(exist_ok=True)
            for event in events:
                report(event)
            destination = open_destination(request)
            lease = destination.lock("played")
            write_notes(destination, lease, error)
            lease.close()
            if error:
                raise error

        monkeypatch.setattr(backend_run, "score_data_set", run)
        return requests

    return prepare


def read_note(folder: Path) -> dict[str, Any]:
    document: dict[str, Any] = json.loads((folder / "out" / "_run.json").read_text())
    return document


def test_finished_run_is_recorded(play: Play, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    requests = play()
    observed: list[Event] = []
    monkeypatch.setattr(RunMetrics, "observe", lambda _, event: observed.append(event))
    seen: list[Progress] = []
    record = score("photos", model="store/m:1", out="out", observe=seen.append, top_k=3)
    assert (requests[0].source, requests[0].top_k) == (str(tmp_path / "photos"), 3)
    assert record.outcome == "finished"
    assert [progress.event for progress in seen][-1] == "finished"
    assert observed == list(RUN)
    assert read_note(tmp_path)["figures"]["scored"] == record.figures.scored == 197


def test_failed_run_is_recorded(play: Play, tmp_path: Path) -> None:
    play((PLANNED,), ScoringError("a store at postgresql://me:secret@host/db failed"))
    with pytest.raises(ScoringError, match="a store"):
        score("photos", model="store/m:1", out="out")
    note = read_note(tmp_path)
    assert note["outcome"] == "failed"
    assert note["reason"] == "a store at postgresql://host/db failed"


@pytest.mark.parametrize("error", [KeyboardInterrupt(), RunInterrupted(15)])
def test_interrupted_run_is_recorded(play: Play, tmp_path: Path, error: BaseException) -> None:
    play((PLANNED,), error)
    with pytest.raises(type(error)):
        score("photos", model="store/m:1", out="out")
    assert read_note(tmp_path)["outcome"] == "interrupted"


def test_run_without_a_plan_is_not_recorded(play: Play, tmp_path: Path) -> None:
    play((), ScoringError("no model"))
    with pytest.raises(ScoringError):
        score("photos", model="store/m:1", out="out")
    assert not (tmp_path / "out" / "_run.json").exists()


def test_unwritable_record_does_not_hide_the_failure(play: Play, tmp_path: Path) -> None:
    play((PLANNED,), ScoringError("the disk is full"))
    (tmp_path / "out" / "_run.json").mkdir(parents=True)
    with pytest.raises(ScoringError, match="the disk is full") as caught:
        score("photos", model="store/m:1", out="out")
    assert "_run.json" in caught.value.__notes__[0]


def test_invalid_request_writes_nothing(play: Play, tmp_path: Path) -> None:
    requests = play()
    with pytest.raises(ScoringError, match="inside the source"):
        score("photos", model="store/m:1", out="photos/out")
    assert requests == []
    assert not (tmp_path / "photos" / "out").exists()


def test_package_exports_functions() -> None:
    assert graphkiln.scoring.score is score
    with pytest.raises(AttributeError, match="nothing"):
        graphkiln.scoring.nothing  # noqa: B018


def test_errors_are_collected_after_commits_or_if_the_file_is_missing(play: Play, tmp_path: Path) -> None:
    play()
    score("photos", model="store/m:1", out="out")
    collected = tmp_path / "out" / "_errors.parquet"
    assert collected.is_file()
    collected.write_bytes(b"of the last run")
    play((PLANNED,))
    score("photos", model="store/m:1", out="out")
    assert collected.read_bytes() == b"of the last run"
    collected.unlink()
    score("photos", model="store/m:1", out="out")
    assert collected.is_file()


def test_uncollectable_errors_fail_the_run(play: Play, tmp_path: Path) -> None:
    play()
    (tmp_path / "out" / "_errors.parquet").mkdir(parents=True)
    with pytest.raises(ScoringError, match="_errors"):
        score("photos", model="store/m:1", out="out")
    note = read_note(tmp_path)
    assert note["outcome"] == "failed"
    assert "_errors.parquet" in note["reason"]


def test_damaged_result_fails_the_run(play: Play, tmp_path: Path) -> None:
    """A resumed run must not succeed over a result of an earlier run that cannot be read."""
    play()
    score("photos", model="store/m:1", out="out")
    (tmp_path / "out" / f"{'0' * 32}.parquet").write_bytes(b"torn")
    with pytest.raises(ScoringError, match=r"0\.parquet, is damaged: .*--verify"):
        score("photos", model="store/m:1", out="out")
    assert read_note(tmp_path)["outcome"] == "failed"


def test_record_of_another_run_is_kept_if_the_lock_is_lost(
    play: Play, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    play()
    score("photos", model="store/m:1", out="out")
    before = read_note(tmp_path)

    def lose(destination: Destination, *_: object) -> int:
        destination.notes.replace(LOCK, memoryview(b"{}"))
        monkeypatch.setattr(Lock, "_has_expired", True)
        raise LockLost("another run took it")

    monkeypatch.setattr(records, "collect_errors", lose)
    with pytest.raises(LockLost, match="another run took it"):
        score("photos", model="store/m:1", out="out")
    assert read_note(tmp_path) == before


# `_run.json`: what it says of a run, what it keeps of those before it, and what it must not hold.

REQUEST = ScoreRequest(source="/photos", model="/store/m", version=3, destination="/out")


def make_record(outcome: str = "finished") -> RunRecord:
    state = RunState(Clock())
    for event in RUN:
        state.observe(event)
    return replace(describe_run(REQUEST, state, datetime.now(UTC)), outcome=outcome)


def write(record: RunRecord, folder: Path) -> dict[str, Any]:
    destination = open_destination(replace(REQUEST, destination=str(folder)))
    records.write_record(record, destination)
    document: dict[str, Any] = json.loads((folder / NOTE).read_text())
    return document


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    open_destination(replace(REQUEST, destination=str(tmp_path / "out"))).prepare()
    return tmp_path / "out"


def test_record_names_workers_and_versions(folder: Path) -> None:
    document = write(make_record(), folder)
    assert document["figures"]["scored"] == 197
    assert document["figures"]["times"]["compute_s"] == 5.0
    assert [worker["rows"] for worker in document["workers"]] == [200, 0]
    worker = document["workers"][0]
    assert (worker["node"], worker["session"], worker["version"]) == (FACTS.node, FACTS.session, FACTS.version)
    assert worker["self_test"]["relative_l2"] == 2e-7
    assert document["quarantined"][0]["id"] == "cats/7.jpg"
    assert document["request"]["version"] == 3
    assert {"python", "graphkiln", "ray", "numpy"} <= set(document["versions"])


def test_earlier_runs_are_listed_newest_first(folder: Path) -> None:
    write(make_record("interrupted"), folder)
    write(make_record("failed"), folder)
    document = write(make_record(), folder)
    assert document["outcome"] == "finished"
    assert [line["outcome"] for line in document["earlier"]] == ["failed", "interrupted"]
    assert document["earlier"][0]["scored"] == 197


def test_damaged_record_is_replaced(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    (folder / NOTE).write_text("{")
    assert write(make_record(), folder)["earlier"] == []
    assert "was damaged" in caplog.text


def test_record_has_effective_settings_and_no_credentials() -> None:
    address = "postgresql://user:hunter2@host/db"
    overrides = (Override("precision", "bf16", "--set"), Override("precision", "fp16", "--set"))
    asked = replace(REQUEST, source=address, destination=address, ledger=address, overrides=overrides)
    described = describe_run(asked, RunState(), datetime.now(UTC)).request
    assert described["settings"] == {"precision": "bf16"}
    assert "hunter2" not in json.dumps(described)
