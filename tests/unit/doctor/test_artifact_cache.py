"""The cache that `serve` would use."""

from __future__ import annotations

from pathlib import Path

import pytest

from graphkiln.doctor import storage as module
from graphkiln.doctor.finding import Finding, Level, Request
from graphkiln.doctor.storage import check_cache
from graphkiln_backend.cache.store import ArtifactCache


def check(cache: Path | str) -> list[Finding]:
    return list(check_cache(Request(cache=str(cache))))


def test_one_that_is_off() -> None:
    (found,) = check("off")
    assert (found.level, found.message) == (Level.OK, "off: models are lowered again at each start")


def test_one_that_is_not_there_yet_is_not_made(tmp_path: Path) -> None:
    (found,) = check(tmp_path / "cache")
    assert found.level is Level.OK
    assert "is made at the first start" in found.message
    assert list(tmp_path.iterdir()) == []


def test_one_that_is_filled(tmp_path: Path) -> None:
    with ArtifactCache(tmp_path) as cache:
        cache.get("engine", "m/1", {"a": "b"}, lambda folder: (folder / "f").write_bytes(bytes(5000)) and None)
    trust, size, unfinished = check(tmp_path)
    assert trust.message == f"{tmp_path}, trusted"
    assert (size.facts["entries"], size.facts["bytes"]) == (1, 5000)
    assert unfinished.message == "none"


def test_one_that_others_can_write_is_a_warning_with_the_way_out(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    found = check(tmp_path)[0]
    assert found.level is Level.WARNING
    assert "is not trusted" in found.message
    assert "--cache DIR" in found.hint


def test_a_file_in_its_place(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    found = check(tmp_path / "file")
    assert [each.level for each in found] == [Level.WARNING]


def test_what_builds_left(tmp_path: Path) -> None:
    (tmp_path / "partial" / "engine-1").mkdir(parents=True)
    assert check(tmp_path)[2].facts["names"] == ["engine-1"]


def test_little_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Full:
        free = 5

    monkeypatch.setattr(module.shutil, "disk_usage", lambda _: Full)
    assert check(tmp_path)[1].level is Level.WARNING


def test_a_user_without_a_home_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> Path:
        raise RuntimeError

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", refuse)
    (found,) = check("")
    assert found.level is Level.WARNING
    assert "set HOME" in found.hint
