"""The artifact cache: what is kept, what is not trusted, and what happens when the disk or a process fails."""

from __future__ import annotations

import errno
import json
import multiprocessing
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from graphkiln_backend.cache.entry import entry_name
from graphkiln_backend.cache.store import ArtifactCache
from graphkiln_backend.graph.errors import CacheError, LoweringError

KEY = {"graph": "abc", "engine": "1.0", "device": "cpu"}


class Builder:
    """Writes a file and counts how often."""

    def __init__(self, content: bytes = b"compiled") -> None:
        self.content = content
        self.calls = 0

    def __call__(self, folder: Path) -> None:
        self.calls += 1
        (folder / "model.blob").write_bytes(self.content)


def fetch(folder: Path, build: Any, key: dict[str, str] | None = None, **options: Any) -> bytes:
    with ArtifactCache(folder, **options) as cache:
        return (cache.get("engine", "m/1", key or KEY, build) / "model.blob").read_bytes()


def entry_of(folder: Path) -> Path:
    (path,) = (folder / "entries").iterdir()
    return path


def test_is_built_once(tmp_path: Path) -> None:
    build = Builder()
    assert [fetch(tmp_path, build), fetch(tmp_path, build)] == [b"compiled"] * 2
    assert build.calls == 1


@pytest.mark.parametrize("changed", KEY)
def test_every_part_of_the_key_makes_another_entry(tmp_path: Path, changed: str) -> None:
    build = Builder()
    fetch(tmp_path, build)
    fetch(tmp_path, build, {**KEY, changed: "other"})
    assert build.calls == 2


def damage(path: Path, how: str) -> None:
    facts = json.loads((path / "entry.json").read_text())
    match how:
        case "flipped":
            (path / "model.blob").write_bytes(b"Compiled")
        case "cut":
            (path / "model.blob").write_bytes(b"comp")
        case "missing":
            (path / "model.blob").unlink()
        case "no entry":
            (path / "entry.json").unlink()
        case "half an entry":
            (path / "entry.json").write_text((path / "entry.json").read_text()[:50])
        case "foreign":
            facts["key"]["graph"] = "another"
            (path / "entry.json").write_text(json.dumps(facts))
        case "leads out":
            facts["files"] = {"../../secret": {"bytes": 1, "sha256": "0"}}
            (path / "entry.json").write_text(json.dumps(facts))


HOW = ["flipped", "cut", "missing", "no entry", "half an entry", "foreign", "leads out"]


@pytest.mark.parametrize("how", HOW)
def test_a_damaged_or_foreign_entry_is_discarded_and_built_again(tmp_path: Path, how: str, logged: list[str]) -> None:
    build = Builder()
    fetch(tmp_path, build)
    damage(entry_of(tmp_path), how)
    with ArtifactCache(tmp_path) as cache:
        assert list(cache.faults()) == [entry_of(tmp_path)]
    assert fetch(tmp_path, build) == b"compiled"
    assert build.calls == 2
    assert "discarded" in logged[0]
    with ArtifactCache(tmp_path) as cache:
        assert not cache.faults()


@pytest.mark.timeout(20)
def test_many_use_an_entry_at_once_and_one_that_is_damaged_meanwhile_is_replaced(tmp_path: Path) -> None:
    build = Builder()
    with ArtifactCache(tmp_path) as first, ArtifactCache(tmp_path) as second, ArtifactCache(tmp_path) as third:
        used = first.get("engine", "m/1", KEY, build)
        with (used / "model.blob").open("rb") as opened:
            assert second.get("engine", "m/1", KEY, build) == used
            damage(used, "missing")
            assert third.get("engine", "m/1", KEY, build) == used
            assert opened.read() == b"compiled"
    assert build.calls == 2


def test_a_failed_build_leaves_nothing(tmp_path: Path) -> None:
    def fail(folder: Path) -> None:
        (folder / "half").write_bytes(b"x")
        raise LoweringError("the engine refuses", attempts=())

    with pytest.raises(LoweringError, match="the engine refuses"):
        fetch(tmp_path, fail)
    assert not list((tmp_path / "entries").iterdir())
    assert not list((tmp_path / "partial").iterdir())
    assert fetch(tmp_path, Builder()) == b"compiled"


@pytest.mark.parametrize(
    ("number", "words"),
    [(errno.ENOSPC, "is full.*graphkiln cache prune"), (errno.EACCES, "cannot be written.*--cache")],
)
def test_a_disk_that_fails_is_a_clear_error_and_harms_no_entry(tmp_path: Path, number: int, words: str) -> None:
    def fail(_: Path) -> None:
        raise OSError(number, os.strerror(number))

    fetch(tmp_path, Builder())
    with pytest.raises(CacheError, match=words):
        fetch(tmp_path, fail, {**KEY, "graph": "other"})
    build = Builder()
    assert fetch(tmp_path, build) == b"compiled"
    assert build.calls == 0


def test_a_runtime_that_fails_on_a_full_disk_is_told_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Full:
        f_bavail = 0

    def fail(_: Path) -> None:
        raise LoweringError("cannot save", attempts=())

    monkeypatch.setattr("graphkiln_backend.cache.store.os.statvfs", lambda _: Full)
    with pytest.raises(CacheError, match="is full"):
        fetch(tmp_path, fail)


def test_a_read_only_folder_serves_what_it_holds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build = Builder()
    fetch(tmp_path, build)

    def read_only(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(ArtifactCache, "_make_folders", read_only)  # tests may run as root, whom no mode stops
    assert fetch(tmp_path, build) == b"compiled"
    assert build.calls == 1
    with pytest.raises(CacheError, match=r"cannot be written: Read-only file system.*graphkiln lower"):
        fetch(tmp_path, build, {**KEY, "graph": "other"})


class TestPruning:
    def test_the_least_recently_used_go_first(self, tmp_path: Path) -> None:
        for number in range(3):
            fetch(tmp_path, Builder(bytes(100)), {**KEY, "graph": str(number)})
            os.utime(tmp_path / "locks" / entry_name("engine", {**KEY, "graph": str(number)}), (number, number))
        fetch(tmp_path, Builder(), {**KEY, "graph": "0"})  # used again
        with ArtifactCache(tmp_path) as cache:
            assert len(cache.prune(200)) == 1
            left = [listed.entry.key["graph"] for listed in cache.entries()]
        assert left == ["2", "0"]

    def test_the_limit_holds_after_every_build(self, tmp_path: Path) -> None:
        for number in range(5):
            fetch(tmp_path, Builder(bytes(100)), {**KEY, "graph": str(number)}, limit_bytes=250)
        with ArtifactCache(tmp_path) as cache:
            assert sum(listed.entry.bytes for listed in cache.entries()) <= 250

    def test_a_read_only_folder_is_a_clear_error(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def read_only(*_: object) -> bool:
            raise OSError(errno.EROFS, "Read-only file system")

        fetch(tmp_path, Builder())
        monkeypatch.setattr(ArtifactCache, "_remove", read_only)
        with ArtifactCache(tmp_path) as cache, pytest.raises(CacheError, match="cannot be written: Read-only"):
            cache.prune(0)

    def test_what_cannot_be_read_goes_too(self, tmp_path: Path) -> None:
        fetch(tmp_path, Builder())
        damage(entry_of(tmp_path), "half an entry")
        with ArtifactCache(tmp_path) as cache:
            cache.prune(1 << 30)
        assert not list((tmp_path / "entries").iterdir())

    def test_what_is_in_use_stays(self, tmp_path: Path) -> None:
        with ArtifactCache(tmp_path) as user, ArtifactCache(tmp_path) as other:
            path = user.get("engine", "m/1", KEY, Builder())
            assert other.prune(0) == []
            assert path.exists()
        with ArtifactCache(tmp_path) as other:
            assert other.prune(0) == [path]


def build_slowly(folder: Path, log: Path) -> None:
    def build(target: Path) -> None:
        with log.open("a") as file:
            file.write("built\n")
        time.sleep(0.3)
        (target / "model.blob").write_bytes(b"compiled")

    assert fetch(folder, build) == b"compiled"


def build_for_ever(folder: Path, started: Path) -> None:
    def build(target: Path) -> None:
        (target / "model.blob").write_bytes(b"half")
        started.touch()
        time.sleep(60)

    fetch(folder, build)


PROCESSES = multiprocessing.get_context("spawn")


def test_many_processes_build_it_once(tmp_path: Path) -> None:
    workers = [PROCESSES.Process(target=build_slowly, args=(tmp_path / "c", tmp_path / "log")) for _ in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
    assert [worker.exitcode for worker in workers] == [0] * 4
    assert (tmp_path / "log").read_text() == "built\n"


def test_a_killed_build_blocks_nobody_and_leaves_no_entry(tmp_path: Path) -> None:
    worker = PROCESSES.Process(target=build_for_ever, args=(tmp_path / "c", tmp_path / "started"))
    worker.start()
    deadline = time.monotonic() + 60
    while not (tmp_path / "started").exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert worker.pid is not None
    os.kill(worker.pid, signal.SIGKILL)
    worker.join(60)
    with ArtifactCache(tmp_path / "c") as cache:
        assert not cache.entries()
        cache.prune(0)
        assert not list((tmp_path / "c" / "partial").iterdir())
    assert fetch(tmp_path / "c", Builder()) == b"compiled"
