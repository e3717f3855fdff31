"""Leftover folders of models sent in a request: recorded by instances, removed at the end of the run."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from graphkiln_backend.triton import sent_models
from graphkiln_backend.triton.environment import SHARED_FOLDER_VARIABLE
from graphkiln_backend.triton.sent_models import NOTES, note_sent, remove_sent


@pytest.fixture
def shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder shared by instances."""
    monkeypatch.setenv(SHARED_FOLDER_VARIABLE, str(tmp_path))
    return tmp_path


@pytest.fixture
def sent() -> Iterator[Path]:
    """A model in a folder like Triton's."""
    folder = Path(f"/tmp/folder{os.getpid() % 1_000_000:06d}")
    (folder / "1").mkdir(parents=True)
    (folder / "1" / "model.onnx").write_bytes(b"x")
    yield folder
    if folder.exists():
        (folder / "1" / "model.onnx").unlink()
        (folder / "1").rmdir()
        folder.rmdir()


def test_sent_model_is_removed(shared: Path, sent: Path) -> None:
    for _ in range(2):  # one for each instance
        note_sent(str(sent))
    remove_sent(shared / NOTES)
    assert not sent.exists()
    assert list((shared / NOTES).iterdir()) == []
    remove_sent(shared / NOTES)


def test_model_of_a_store_is_not_recorded(shared: Path) -> None:
    note_sent(str(shared / "digits"))
    note_sent("/tmp/folder-of-models")
    assert not (shared / NOTES).exists()
    remove_sent(shared / NOTES)


def test_other_folders_are_not_removed(shared: Path, tmp_path: Path) -> None:
    mine = tmp_path / "folderAAAAAA"
    mine.mkdir()
    (shared / NOTES).mkdir()
    (shared / NOTES / mine.name).symlink_to(mine)
    (shared / NOTES / "text").write_text("no link")
    remove_sent(shared / NOTES)
    assert mine.is_dir()


def test_folder_of_another_user_is_not_removed(shared: Path, sent: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    note_sent(str(sent))
    monkeypatch.setattr(sent_models.os, "geteuid", lambda: os.getuid() + 1)
    remove_sent(shared / NOTES)
    assert sent.is_dir()


def test_folder_removed_by_triton_is_ignored(shared: Path) -> None:
    note_sent("/tmp/folder______")
    remove_sent(shared / NOTES)
    assert list((shared / NOTES).iterdir()) == []


def test_unwritable_record_does_not_prevent_loading(
    sent: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(SHARED_FOLDER_VARIABLE, str(tmp_path / "gone"))
    note_sent(str(sent))
    assert sent.is_dir()
