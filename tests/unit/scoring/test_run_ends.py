"""How a run ends: what it leaves beside its results is written while the destination is its own. No Ray is started."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from scoring_runs import make_request

from graphkiln_backend.graph.errors import GraphkilnError
from graphkiln_backend.scoring import driver as run
from graphkiln_backend.scoring.destinations.base import Destination
from graphkiln_backend.scoring.destinations.lock import Lock
from graphkiln_backend.scoring.errors import DestinationBusy, LockLost, ScoringError
from graphkiln_backend.scoring.messages import InputRange, ScoreRequest


class Nothing:
    """A source without a row: there is nothing to be scored."""

    def ranges(self, _: int) -> Iterator[InputRange]:
        return iter(())


class Unlistable:
    """A source that fails."""

    def ranges(self, _: int) -> Iterator[InputRange]:
        raise ScoringError("a folder cannot be listed")


@pytest.fixture
def request_of_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ScoreRequest:
    monkeypatch.setattr(run, "open_source", lambda _: Nothing())
    return make_request(tmp_path / "in", tmp_path / "out")


def test_a_second_driver_finds_it_claimed_until_the_first_has_written_all(request_of_nothing: ScoreRequest) -> None:
    written: list[BaseException | None] = []

    def write_notes(destination: Destination, lock: Lock, error: BaseException | None) -> None:
        lock.check()
        with pytest.raises(DestinationBusy):
            run.score_data_set(request_of_nothing)
        destination.notes.replace("_run.json", memoryview(b"first"))
        written.append(error)

    run.score_data_set(request_of_nothing, write_notes=write_notes)
    assert written == [None]
    run.score_data_set(request_of_nothing)


def test_a_run_that_fails_leaves_notes_too_before_another_may_begin(
    request_of_nothing: ScoreRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "open_source", lambda _: Unlistable())
    written: list[str] = []

    def write_notes(destination: Destination, _: Lock, error: BaseException | None) -> None:
        with pytest.raises(DestinationBusy):
            destination.lock("another")
        written.append(str(error))

    with pytest.raises(ScoringError, match="cannot be listed"):
        run.score_data_set(request_of_nothing, write_notes=write_notes)
    assert written == ["a folder cannot be listed"]


def test_one_whose_destination_was_taken_over_writes_nothing_there(
    request_of_nothing: ScoreRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    def check(_: Lock) -> None:
        raise LockLost("another run took over")

    monkeypatch.setattr(Lock, "check", check)
    written: list[object] = []
    with pytest.raises(LockLost):
        run.score_data_set(request_of_nothing, write_notes=lambda *given: written.append(given))
    assert written == []


def test_a_mistake_in_the_model_is_told_before_the_destination_is_touched(request_of_nothing: ScoreRequest) -> None:
    request = replace(request_of_nothing, model=Path(str(request_of_nothing.model) + "s"))
    written: list[object] = []
    with pytest.raises(GraphkilnError, match="did you mean"):
        run.score_data_set(request, write_notes=lambda *given: written.append(given))
    assert not Path(request.destination).exists()
    assert written == []
