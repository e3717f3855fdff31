"""Rollouts as users change them, with a server that is a thread or is not there."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import graphkiln
from graphkiln_backend.graph.errors import RepositoryError
from graphkiln_backend.server import rollout_changes, rollouts
from graphkiln_backend.server.rollout_changes import Rollout
from graphkiln_backend.server.rollouts import Gates, Progress, RolloutError, RolloutFolder, Wanted

Applies = Callable[[Wanted], Progress]


def applied(wanted: Wanted) -> Progress:
    """Progress of a server that has applied a change."""
    return Progress(
        model=wanted.model,
        candidate=wanted.candidate,
        serving=wanted.serving,
        phase=wanted.phase,
        share=wanted.share,
        applied_serial=wanted.serial,
    )


def refused(wanted: Wanted) -> Progress:
    """Progress of a server that refuses the version."""
    progress = applied(wanted)
    progress.phase, progress.reason = "aborted", "a model with sequences cannot be tried"
    return progress


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model with versions 1 to 3."""
    for version in (1, 2, 3):
        (tmp_path / "store" / "digits" / str(version)).mkdir(parents=True)
    return tmp_path / "store" / "digits"


@pytest.fixture
def folder(model: Path, tmp_path: Path) -> RolloutFolder:
    return RolloutFolder(tmp_path / "state", model.parent)


@pytest.fixture
def serve(folder: RolloutFolder) -> Iterator[Callable[[Applies], None]]:
    """Begin to apply changes, as a server does."""
    ended = threading.Event()
    threads = []

    def run(applies: Applies) -> None:
        while not ended.wait(0.02):
            if wanted := folder.read_wanted("digits"):
                progress = applies(wanted)
                progress.updated_at = time.time()
                folder.write_progress(progress)

    def begin(applies: Applies = applied) -> None:
        threads.append(threading.Thread(target=run, args=(applies,)))
        threads[-1].start()

    yield begin
    ended.set()
    for thread in threads:
        thread.join()


@pytest.fixture
def opened(model: Path, tmp_path: Path) -> Rollout:
    return graphkiln.rollout(model, state=tmp_path / "state", timeout_s=5.0)


def test_whole_rollout(serve: Callable[..., None], opened: Rollout) -> None:
    serve()
    begun = opened.start(3, shadow=0.05, gates=Gates(agree=0.99))
    assert (begun.phase, begun.wanted.serving, begun.wanted.candidate) == ("shadow", 2, 3)
    assert begun.progress is not None
    assert begun.progress.share == 0.05
    assert opened.traffic(0.1).phase == "traffic"
    promoted = opened.promote()
    assert (promoted.phase, promoted.is_applied, promoted.wanted.serial) == ("promoted", True, 3)
    assert opened.start(1, shadow=0.05).wanted.serving == 3  # an older version is fine; the promoted one serves
    assert opened.abort().phase == "aborted"
    assert opened.start(2, shadow=1.0).wanted.serving == 3


def test_version_that_does_not_exist(opened: Rollout) -> None:
    with pytest.raises(RolloutError, match=r"digits has no version 7 \(its versions are 1, 2, 3\)"):
        opened.start(7, shadow=0.05)


def test_version_that_serves(serve: Callable[..., None], opened: Rollout) -> None:
    serve()
    opened.start(3, shadow=0.05)
    with pytest.raises(RolloutError, match="to version 3 is running"):
        opened.start(2, shadow=0.05)
    opened.promote()
    with pytest.raises(RolloutError, match="version 3 of digits is the one that serves"):
        opened.start(3, shadow=0.05)


def test_only_version(tmp_path: Path) -> None:
    (tmp_path / "store" / "one" / "1").mkdir(parents=True)
    with pytest.raises(RolloutError, match="version 1 is the only one of one"):
        Rollout(tmp_path / "store" / "one", state=tmp_path / "state").start(1, shadow=0.05)


def test_model_that_does_not_exist(model: Path, tmp_path: Path) -> None:
    with pytest.raises(RepositoryError, match="digits"):
        Rollout(model.parent / "digit", state=tmp_path)


def test_without_a_rollout(opened: Rollout) -> None:
    for change in (opened.status, opened.promote, opened.abort, lambda: opened.traffic(0.1)):
        with pytest.raises(RolloutError, match="digits has no rollout"):
            change()


def test_ended_rollout_cannot_be_changed(serve: Callable[..., None], opened: Rollout) -> None:
    serve()
    opened.start(3, shadow=0.05)
    opened.abort()
    with pytest.raises(RolloutError, match="has ended, it was aborted"):
        opened.promote()


def test_no_server(monkeypatch: pytest.MonkeyPatch, opened: Rollout, folder: RolloutFolder) -> None:
    monkeypatch.setattr(rollout_changes, "SILENCE_S", 0.2)
    with pytest.raises(RolloutError, match=r"no server applies .* none has ever written .*abort` withdraws it"):
        opened.start(3, shadow=0.05)
    assert folder.read_wanted("digits") is not None  # a server that starts later applies it
    old = applied(folder.read_wanted("digits") or Wanted(model="", candidate=0, serving=0))
    old.updated_at = time.time() - 3600
    folder.write_progress(old)
    with pytest.raises(RolloutError, match="none has written for 3600 s"):
        opened.abort()


def test_server_that_proves_for_long(serve: Callable[..., None], opened: Rollout, model: Path, tmp_path: Path) -> None:
    def proves(wanted: Wanted) -> Progress:
        progress = applied(wanted)
        progress.phase, progress.applied_serial = "", 0
        return progress

    serve(proves)
    hasty = Rollout(model, state=tmp_path / "state", timeout_s=0.3)
    with pytest.raises(RolloutError, match=r"has not applied it within 0.3 s"):
        hasty.start(3, shadow=0.05)
    status = opened.status()
    assert (status.is_applied, status.phase) == (False, "")


def test_refused_version(serve: Callable[..., None], opened: Rollout) -> None:
    serve(refused)
    with pytest.raises(RolloutError, match=r"not tried: a model with sequences .*version 2 serves on"):
        opened.start(3, shadow=0.05)


def test_refused_version_before_the_progress_is_written(opened: Rollout, folder: RolloutFolder) -> None:
    def refuse() -> None:
        while not (wanted := folder.read_wanted("digits")):
            time.sleep(0.02)
        folder.write_wanted(wanted.changed("aborted", reason="its labels differ"))

    server = threading.Thread(target=refuse)
    server.start()
    with pytest.raises(RolloutError, match="not tried: its labels differ"):
        opened.start(3, shadow=0.05)
    server.join()


def test_time_left(opened: Rollout, folder: RolloutFolder) -> None:
    wanted = Wanted(
        model="digits", candidate=3, serving=2, share=0.05, gates=Gates(agree=0.99, requests=1000), changed_at=1000.0
    )
    folder.write_wanted(wanted)
    progress = applied(wanted)
    progress.compared = progress.agreed = 250
    progress.updated_at = 1060.0
    folder.write_progress(progress)
    status = opened.status()
    assert status.seconds_left == pytest.approx(180.0)
    assert status.progress is not None
    status.progress.phase, status.progress.answered = "traffic", 250  # of which few are compared
    assert status.seconds_left == pytest.approx(60.0)
    assert status.verdict is not None
    assert status.verdict.low < 1.0


def test_remote_store(tmp_path: Path) -> None:
    """Its versions are not looked up: the server knows them."""
    remote = Rollout("s3://bucket/store/digits", state=tmp_path / "state")
    RolloutFolder(tmp_path / "state", "s3://bucket/store").write_wanted(Wanted(model="digits", candidate=3, serving=2))
    assert remote.status().wanted.candidate == 3


def test_a_state_folder_that_cannot_be_written(opened: Rollout, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(rollouts, "replace_file", refuse)
    with pytest.raises(RolloutError, match=r"cannot be written: Read-only file system \(make room .* --state DIR\)"):
        opened.start(3, shadow=0.05)
