"""A run from Python: the record that it leaves, whichever way it ends."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from score_events import PLANNED, RUN

import graphkiln
from graphkiln.scoring import score
from graphkiln.scoring.metrics import RunMetrics
from graphkiln.scoring.run_state import Progress
from graphkiln_backend.scoring import driver as backend_run
from graphkiln_backend.scoring.driver import WriteNotes
from graphkiln_backend.scoring.errors import RunInterrupted, ScoringError
from graphkiln_backend.scoring.messages import Event, Report
from graphkiln_backend.scoring.opening import open_destination
from graphkiln_backend.scoring.request import ScoreRequest

Play = Callable[..., list[ScoreRequest]]


@pytest.fixture
def play(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Play:
    """Makes a run that tells some events and ends as it is told; returns what is requested of it."""
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
            lease = destination.claim("played")
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


def test_a_run_and_its_record(play: Play, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    requests = play()
    told: list[Event] = []
    monkeypatch.setattr(RunMetrics, "observe", lambda _, event: told.append(event))
    seen: list[Progress] = []
    record = score("photos", model="store/m:1", out="out", observe=seen.append, top_k=3)
    assert (requests[0].source, requests[0].top_k) == (str(tmp_path / "photos"), 3)
    assert record.outcome == "finished"
    assert [progress.event for progress in seen][-1] == "finished"
    assert told == list(RUN)
    assert read_note(tmp_path)["figures"]["scored"] == record.figures.scored == 197


def test_a_run_that_fails_leaves_its_record_too(play: Play, tmp_path: Path) -> None:
    play((PLANNED,), ScoringError("a store at postgresql://me:secret@host/db failed"))
    with pytest.raises(ScoringError, match="a store"):
        score("photos", model="store/m:1", out="out")
    note = read_note(tmp_path)
    assert note["outcome"] == "failed"
    assert note["reason"] == "a store at postgresql://host/db failed"


@pytest.mark.parametrize("error", [KeyboardInterrupt(), RunInterrupted(15)])
def test_so_does_one_that_is_interrupted(play: Play, tmp_path: Path, error: BaseException) -> None:
    play((PLANNED,), error)
    with pytest.raises(type(error)):
        score("photos", model="store/m:1", out="out")
    assert read_note(tmp_path)["outcome"] == "interrupted"


def test_one_that_planned_nothing_leaves_none(play: Play, tmp_path: Path) -> None:
    play((), ScoringError("no model"))
    with pytest.raises(ScoringError):
        score("photos", model="store/m:1", out="out")
    assert not (tmp_path / "out" / "_run.json").exists()


def test_a_record_that_cannot_be_written_does_not_hide_why_the_run_failed(play: Play, tmp_path: Path) -> None:
    play((PLANNED,), ScoringError("the disk is full"))
    (tmp_path / "out" / "_run.json").mkdir(parents=True)
    with pytest.raises(ScoringError, match="the disk is full") as caught:
        score("photos", model="store/m:1", out="out")
    assert "_run.json" in caught.value.__notes__[0]


def test_a_mistake_ends_it_before_anything_is_written(play: Play, tmp_path: Path) -> None:
    requests = play()
    with pytest.raises(ScoringError, match="inside the source"):
        score("photos", model="store/m:1", out="photos/out")
    assert requests == []
    assert not (tmp_path / "photos" / "out").exists()


def test_the_names_are_reached_through_the_package() -> None:
    assert graphkiln.scoring.score is score
    with pytest.raises(AttributeError, match="nothing"):
        graphkiln.scoring.nothing  # noqa: B018


def test_errors_are_collected_by_a_run_that_did_something_or_where_the_last_one_did_not_come_to_it(
    play: Play, tmp_path: Path
) -> None:
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


def test_errors_that_cannot_be_collected_are_what_the_run_failed_for(play: Play, tmp_path: Path) -> None:
    play()
    (tmp_path / "out" / "_errors.parquet").mkdir(parents=True)
    with pytest.raises(ScoringError, match="_errors"):
        score("photos", model="store/m:1", out="out")
    note = read_note(tmp_path)
    assert note["outcome"] == "failed"
    assert "_errors.parquet" in note["reason"]
