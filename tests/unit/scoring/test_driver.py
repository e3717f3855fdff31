"""The ends of a run: notes, signals, errors and temporary folders. Ray is not started."""

from __future__ import annotations

import pickle
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from scoring_runs import make_request

from graphkiln_backend.graph.errors import GraphkilnError
from graphkiln_backend.scoring import driver
from graphkiln_backend.scoring.destinations.base import Destination
from graphkiln_backend.scoring.destinations.lock import Lock
from graphkiln_backend.scoring.driver import interruptible, score_data_set
from graphkiln_backend.scoring.errors import DestinationBusy, LockLost, RunInterrupted, ScoringError, StoreError
from graphkiln_backend.scoring.messages import InputRange, ScoreRequest
from graphkiln_backend.scoring.scratch import Scratch, remove_dead_scratch, scratch_folder

DIE = """
import os, sys
from pathlib import Path
from graphkiln_backend.system.owned_folder import OwnedFolder
from graphkiln_backend.scoring.scratch import Scratch, scratch_folder
folders = [folder for parent in map(Path, sys.argv[1:])
           for folder in [*(scratch_folder(each, parent) for each in Scratch), OwnedFolder(parent)]]
print(*(folder.path for folder in folders), flush=True)
os._exit(9)
"""


class Empty:
    """A source without rows."""

    def ranges(self, _: int) -> Iterator[InputRange]:
        return iter(())


class Broken:
    """A source that cannot be listed."""

    def ranges(self, _: int) -> Iterator[InputRange]:
        raise ScoringError("a folder cannot be listed")


@pytest.fixture
def empty_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ScoreRequest:
    monkeypatch.setattr(driver, "open_source", lambda _: Empty())
    return make_request(tmp_path / "in", tmp_path / "out")


def test_destination_is_locked_until_the_notes_are_written(empty_request: ScoreRequest) -> None:
    written: list[BaseException | None] = []

    def write_notes(destination: Destination, lock: Lock, error: BaseException | None) -> None:
        lock.check()
        with pytest.raises(DestinationBusy):
            score_data_set(empty_request)
        destination.notes.replace("_run.json", memoryview(b"first"))
        written.append(error)

    score_data_set(empty_request, write_notes=write_notes)
    assert written == [None]
    score_data_set(empty_request)


def test_failed_run_writes_notes(empty_request: ScoreRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "open_source", lambda _: Broken())
    written: list[object] = []
    with pytest.raises(ScoringError, match="cannot be listed"):
        score_data_set(empty_request, write_notes=lambda _, __, error: written.append(str(error)))
    assert written == ["a folder cannot be listed"]


def test_run_that_lost_its_lock_writes_no_notes(empty_request: ScoreRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    def check(_: Lock) -> None:
        raise LockLost("another run took over")

    monkeypatch.setattr(Lock, "check", check)
    written: list[object] = []
    with pytest.raises(LockLost):
        score_data_set(empty_request, write_notes=lambda *given: written.append(given))
    assert written == []


def test_error_in_the_model_leaves_the_destination_untouched(empty_request: ScoreRequest) -> None:
    request = replace(empty_request, model=Path(str(empty_request.model) + "s"))
    with pytest.raises(GraphkilnError, match="did you mean"):
        score_data_set(request)
    assert not Path(request.destination).exists()


@pytest.mark.usefixtures("hangup_ends")
@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_first_signal_interrupts_and_sets_the_exit_code(number: signal.Signals, status: int) -> None:
    def signal_twice() -> None:
        try:
            signal.raise_signal(number)
        finally:
            signal.raise_signal(number)

    before = signal.getsignal(number)
    with pytest.raises(RunInterrupted, match="run the same command") as caught, interruptible():
        signal_twice()
    assert (caught.value.exit_code, signal.getsignal(number)) == (status, before)


def test_signal_in_compiled_code_interrupts() -> None:
    with pytest.raises(RunInterrupted), interruptible():
        raise SystemError("returned a result with an exception set") from RunInterrupted(signal.SIGTERM)
    with pytest.raises(SystemError, match="another"), interruptible():
        raise SystemError("another")


def test_store_error_can_be_pickled() -> None:
    error = pickle.loads(pickle.dumps(StoreError("the disk is full", hint="free some", passing=True)))  # noqa: S301
    assert (str(error), error.passing) == ("the disk is full (free some)", True)


def test_folders_of_killed_runs_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    command = [sys.executable, "-c", DIE, str(tmp_path)]
    printed = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60).stdout
    folders = list(map(Path, printed.split()))
    assert len(folders) == len(Scratch) + 1
    with scratch_folder(Scratch.PLAN) as living:
        remove_dead_scratch()
        assert living.path.is_dir()
    other = folders[-1]  # of a server, which cleans up more than folders
    assert [path for path in folders if path.exists()] == [other]
