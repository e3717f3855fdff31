"""Checks of temporary folder, shared memory, leftovers and the cache, without changing them."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

from graphkiln.doctor import storage as module
from graphkiln.doctor.examination import Finding, Level, Request
from graphkiln.doctor.storage import (
    check_cache,
    check_leftovers,
    check_shared_memory,
    check_temporary_folder,
    find_shared_memory,
)
from graphkiln_backend.cache.store import ArtifactCache
from graphkiln_backend.server import limits, run_folder
from graphkiln_backend.system.owned_folder import OwnedFolder

MB = 1 << 20


def free(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    disk = type("Disk", (), {"free": size})
    monkeypatch.setattr(module.shutil, "disk_usage", lambda _: disk)


def test_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    found = [*check_temporary_folder(Request()), *check_shared_memory(Request())]
    assert [each.subject for each in found] == ["temporary folder", "shared memory"]
    assert list(tmp_path.iterdir()) == []


def test_missing_folders(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "gone"))
    monkeypatch.setattr(run_folder, "OTHER_PARENTS", ())
    monkeypatch.setattr(limits, "SHARED_MEMORY", tmp_path / "gone")
    (temporary,), (shared,) = check_temporary_folder(Request()), check_shared_memory(Request())
    assert temporary.level is shared.level is Level.ERROR
    assert "TMPDIR" in temporary.hint


@pytest.mark.parametrize(("size", "level"), [(65 * MB, Level.OK), (63 * MB, Level.WARNING)])
def test_low_disk_space(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int, level: Level) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    free(monkeypatch, size)
    (found,) = check_temporary_folder(Request())
    assert found.level is level


@pytest.mark.parametrize(
    ("size", "can_write", "level"),
    [
        (1024 * MB, True, Level.OK),
        (64 * MB, True, Level.WARNING),
        (MB - 1, True, Level.ERROR),
        (1024 * MB, False, Level.ERROR),
    ],
)
def test_shared_memory(size: int, can_write: bool, level: Level) -> None:
    found = find_shared_memory(Path("/dev/shm"), size, 2048 * MB, can_write=can_write)
    assert found.level is level
    assert bool(found.hint) == (level is not Level.OK)


def test_leftovers_are_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_folder, "_default_parents", lambda: {tmp_path})
    monkeypatch.setattr(run_folder, "SHARED_MEMORY", tmp_path)
    with OwnedFolder(tmp_path) as living, OwnedFolder(tmp_path) as dead:
        os.close(dead._lock)
        dead._lock = -1
        left, lives = check_leftovers(Request())
        assert (left.level, left.facts["paths"]) == (Level.WARNING, [str(dead.path)])
        assert "graphkiln serve" in left.hint
        assert lives.facts["paths"] == [str(living.path)]
        assert dead.path.is_dir()
    left, lives = check_leftovers(Request())
    assert (left.level, left.message) == (Level.OK, "no leftovers")


def check(cache: Path | str) -> list[Finding]:
    return list(check_cache(Request(cache=str(cache))))


def test_disabled_and_missing_cache(tmp_path: Path) -> None:
    (off,), (missing,) = check("off"), check(tmp_path / "cache")
    assert (off.level, off.message) == (Level.OK, "off: models are lowered again at each start")
    assert missing.level is Level.OK
    assert "will be created" in missing.message
    assert list(tmp_path.iterdir()) == []


def test_cache_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with ArtifactCache(tmp_path) as cache:
        cache.get("engine", "m/1", {"a": "b"}, lambda folder: (folder / "f").write_bytes(bytes(5000)) and None)
    trust, size, unfinished = check(tmp_path)
    assert trust.message == f"{tmp_path}, trusted"
    assert (size.facts["entries"], size.facts["bytes"], size.level) == (1, 5000, Level.OK)
    assert unfinished.message == "none"
    (tmp_path / "partial" / "engine-1").mkdir(parents=True)
    free(monkeypatch, 5)
    trust, size, unfinished = check(tmp_path)
    assert size.level is Level.WARNING
    assert unfinished.facts["names"] == ["engine-1"]


def test_unusable_cache_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> Path:
        raise RuntimeError

    (tmp_path / "file").touch()
    assert [each.level for each in check(tmp_path / "file")] == [Level.WARNING]
    tmp_path.chmod(0o777)
    found = check(tmp_path)[0]
    assert found.level is Level.WARNING
    assert "is not trusted" in found.message
    assert "--cache DIR" in found.hint
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", refuse)
    (found,) = check("")
    assert found.level is Level.WARNING
    assert "set HOME" in found.hint
