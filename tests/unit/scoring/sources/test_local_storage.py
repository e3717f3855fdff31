"""Folders as they are found: links, circles, what may not be read, what changes."""

from __future__ import annotations

import errno
import logging
import os
from pathlib import Path
from typing import Any

import pytest

from graphkiln_backend.graph.files import UnusableFile
from graphkiln_backend.scoring.errors import InputChanged, ScoringError, SourceUnavailable
from graphkiln_backend.scoring.sources import storage as local_storage
from graphkiln_backend.scoring.sources.storage import LocalStorage

STORAGE = LocalStorage()


def paths(folder: Path) -> list[str]:
    return [file.path for file in STORAGE.walk(str(folder))]


def write(*files: Path) -> None:
    for path in files:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"content")


def test_paths_are_sorted_as_a_bucket_sorts_its_keys(tmp_path: Path) -> None:
    names = ["a/b", "a.jpg", "a-b", "a/a.jpg", "B", "ä", "a0"]
    write(*(tmp_path / name for name in names))
    assert paths(tmp_path) == sorted(names, key=str.encode)


def test_hidden_files_and_folders_are_left_out(tmp_path: Path) -> None:
    write(tmp_path / ".thumbs" / "a.jpg", tmp_path / "._a.jpg", tmp_path / "a.jpg")
    assert paths(tmp_path) == ["a.jpg"]


def test_linked_folders_are_followed_without_circles(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write(tmp_path / "elsewhere" / "b.jpg", tmp_path / "photos" / "a.jpg")
    (tmp_path / "photos" / "linked").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "elsewhere" / "up").symlink_to(tmp_path / "photos")
    (tmp_path / "photos" / "itself.jpg").symlink_to("itself.jpg")
    with caplog.at_level(logging.WARNING, "graphkiln.scoring"):
        assert paths(tmp_path / "photos") == ["a.jpg", "itself.jpg", "linked/b.jpg"]
    assert "not followed" in caplog.text


def test_unreadable_folder_ends_the_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "closed" / "a.jpg")
    scandir = os.scandir

    def refuse(path: bytes) -> Any:
        if path.endswith(b"closed"):  # root may read what others may not
            raise PermissionError(errno.EACCES, "Permission denied")
        return scandir(path)

    monkeypatch.setattr(local_storage.os, "scandir", refuse)
    with pytest.raises(ScoringError, match=r"cannot read .*closed: Permission denied"):
        paths(tmp_path)


@pytest.fixture
def image(tmp_path: Path) -> Path:
    path = tmp_path / "a.jpg"
    path.write_bytes(b"0123456789")
    return path


def stamp_of(path: Path) -> str:
    found = STORAGE.find(str(path))
    assert found
    return found.stamp


def test_modification_time_identifies_a_file(image: Path) -> None:
    stamp = stamp_of(image)
    os.utime(image, ns=(0, 1))
    for read in (STORAGE.read, STORAGE.open):
        with pytest.raises(InputChanged, match="has changed"):
            read(str(image), stamp)


def test_a_file_that_changes_while_it_is_read_is_noticed(image: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stamp = stamp_of(image)
    read_stream = local_storage.read_stream

    def write_meanwhile(file: Any, limit: int) -> bytes:
        content = read_stream(file, limit)
        image.write_bytes(b"other")
        return content

    monkeypatch.setattr(local_storage, "read_stream", write_meanwhile)
    with pytest.raises(InputChanged, match="has changed"):
        STORAGE.read(str(image), stamp)


def test_a_pipe_does_not_hang_its_reader(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a.jpg")
    assert paths(tmp_path) == ["a.jpg"]
    with pytest.raises(UnusableFile, match="a pipe"):
        STORAGE.read(str(tmp_path / "a.jpg"), None)


def test_a_failing_disk_blames_no_row(image: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(local_storage, "open_regular", fail)
    for read in (STORAGE.read, STORAGE.open):
        with pytest.raises(SourceUnavailable, match="Input/output error"):
            read(str(image), None)
