"""Temporary folder, shared memory, and what dead runs left."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

from graphkiln.doctor.finding import Level, Request
from graphkiln.doctor.storage import (
    check_leftovers,
    check_shared_memory,
    check_temporary_folder,
    find_shared_memory,
    find_temporary,
)
from graphkiln_backend.server import leftovers, run_folder
from graphkiln_backend.system.owned_folder import OwnedFolder

MB = 1 << 20


def test_this_machine_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    found = [*check_temporary_folder(Request()), *check_shared_memory(Request())]
    assert [each.subject for each in found] == ["temporary folder", "shared memory"]
    assert list(tmp_path.iterdir()) == []


def test_a_temporary_folder_that_cannot_be_made_is_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "gone"))
    monkeypatch.setattr(run_folder, "OTHER_PARENTS", ())
    found = next(iter(check_temporary_folder(Request())))
    assert found.level is Level.ERROR
    assert "TMPDIR" in found.hint


@pytest.mark.parametrize(("free", "level"), [(65 * MB, Level.OK), (63 * MB, Level.WARNING)])
def test_little_room(tmp_path: Path, free: int, level: Level) -> None:
    assert find_temporary(tmp_path, free).level is level


@pytest.mark.parametrize(
    ("free", "can_write", "level"),
    [
        (1024 * MB, True, Level.OK),
        (64 * MB, True, Level.WARNING),
        (MB - 1, True, Level.ERROR),
        (1024 * MB, False, Level.ERROR),
    ],
)
def test_shared_memory(free: int, can_write: bool, level: Level) -> None:
    found = find_shared_memory(Path("/dev/shm"), free, 2048 * MB, can_write=can_write)
    assert found.level is level
    assert bool(found.hint) == (level is not Level.OK)


def test_no_shared_memory_at_all(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("graphkiln_backend.server.run_folder.SHARED_MEMORY", tmp_path / "gone")
    assert next(iter(check_shared_memory(Request()))).level is Level.ERROR


def test_what_dead_runs_left_is_named_and_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leftovers, "_default_parents", lambda: {tmp_path})
    monkeypatch.setattr(leftovers, "SHARED_MEMORY", tmp_path)
    with OwnedFolder(tmp_path) as living, OwnedFolder(tmp_path) as dead:
        os.close(dead._lock)
        dead._lock = -1
        left, lives = check_leftovers(Request())
        assert left.level is Level.WARNING
        assert left.facts["paths"] == [str(dead.path)]
        assert "graphkiln serve" in left.hint
        assert lives.facts["paths"] == [str(living.path)]
        assert dead.path.is_dir()
    left, lives = check_leftovers(Request())
    assert (left.level, left.message) == (Level.OK, "left nothing")
