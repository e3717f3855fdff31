"""The artifact cache: entries, damage, faults of disks and processes, pruning."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import multiprocessing
import os
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from graphkiln_backend.cache import store
from graphkiln_backend.cache.store import (
    ArtifactCache,
    Entry,
    FileRecord,
    entry_name,
    find_fault,
    read_entry,
    wait_for_lock,
)
from graphkiln_backend.graph.errors import CacheError, LoweringError

KEY = {"graph": "abc", "engine": "1.0", "device": "cpu"}


class Builder:
    """Write a file, and count the calls."""

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


def test_entry_is_built_once(tmp_path: Path) -> None:
    build = Builder()
    assert [fetch(tmp_path, build), fetch(tmp_path, build)] == [b"compiled"] * 2
    assert build.calls == 1


@pytest.mark.parametrize("changed", KEY)
def test_each_part_of_the_key_counts(tmp_path: Path, changed: str) -> None:
    build = Builder()
    fetch(tmp_path, build)
    fetch(tmp_path, build, {**KEY, changed: "other"})
    assert build.calls == 2


def open_files() -> set[str]:
    return {path.name for path in Path("/proc/self/fd").iterdir()}


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
def test_damaged_entry_is_built_again(tmp_path: Path, how: str, logged: list[str]) -> None:
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
def test_entry_damaged_while_in_use(tmp_path: Path) -> None:
    build = Builder()
    with ArtifactCache(tmp_path) as first, ArtifactCache(tmp_path) as second, ArtifactCache(tmp_path) as third:
        used = first.get("engine", "m/1", KEY, build)
        with (used / "model.blob").open("rb") as opened:
            assert second.get("engine", "m/1", KEY, build) == used
            damage(used, "missing")
            assert third.get("engine", "m/1", KEY, build) == used
            assert opened.read() == b"compiled"
    assert build.calls == 2


def test_permissions_of_an_entry(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        fetch(tmp_path, Builder())
    finally:
        os.umask(before)
    path = entry_of(tmp_path)
    assert not any(place.stat().st_mode & 0o022 for place in (path, *path.iterdir()))


def test_failed_build_leaves_nothing(tmp_path: Path) -> None:
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
def test_failing_disk(tmp_path: Path, number: int, words: str) -> None:
    def fail(_: Path) -> None:
        raise OSError(number, os.strerror(number))

    fetch(tmp_path, Builder())
    with pytest.raises(CacheError, match=words):
        fetch(tmp_path, fail, {**KEY, "graph": "other"})
    build = Builder()
    assert fetch(tmp_path, build) == b"compiled"
    assert build.calls == 0


def test_runtime_that_fails_on_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Full:
        f_bavail = 0

    def fail(_: Path) -> None:
        raise LoweringError("cannot save", attempts=())

    monkeypatch.setattr("graphkiln_backend.cache.store.os.statvfs", lambda _: Full)
    with pytest.raises(CacheError, match="is full"):
        fetch(tmp_path, fail)


def test_read_only_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
    def test_least_recently_used_are_pruned(self, tmp_path: Path) -> None:
        for number in range(3):
            fetch(tmp_path, Builder(bytes(100)), {**KEY, "graph": str(number)})
            os.utime(tmp_path / "locks" / entry_name("engine", {**KEY, "graph": str(number)}), (number, number))
        fetch(tmp_path, Builder(), {**KEY, "graph": "0"})  # used again
        with ArtifactCache(tmp_path) as cache:
            assert len(cache.prune(200)) == 1
            left = [listed.entry.key["graph"] for listed in cache.entries()]
        assert left == ["2", "0"]

    def test_unreadable_entries_are_pruned(self, tmp_path: Path) -> None:
        fetch(tmp_path, Builder())
        damage(entry_of(tmp_path), "half an entry")
        with ArtifactCache(tmp_path) as cache:
            cache.prune(1 << 30)
        assert not list((tmp_path / "entries").iterdir())

    def test_entries_in_use_are_not_pruned(self, tmp_path: Path) -> None:
        with ArtifactCache(tmp_path) as user, ArtifactCache(tmp_path) as other:
            path = user.get("engine", "m/1", KEY, Builder())
            assert other.prune(0) == []
            assert path.exists()
        with ArtifactCache(tmp_path) as other:
            assert other.prune(0) == [path]


class TestReserving:
    def test_reserve_and_write(self, cache: ArtifactCache) -> None:
        with cache.reserve("engine", "m/1", KEY) as entry:
            assert entry.path is None
            with entry.write() as folder:
                assert list(folder.iterdir()) == []
                (folder / "model.blob").write_bytes(b"compiled")
            assert entry.path == cache.folder / "entries" / entry_name("engine", KEY)
        with cache.reserve("engine", "m/1", KEY) as again:
            assert again.path == entry.path
        build = Builder()
        assert cache.get("engine", "m/1", KEY, build) == entry.path
        assert build.calls == 0

    def test_written_entry_survives_an_error_in_the_block(self, tmp_path: Path) -> None:
        def write_and_fail(cache: ArtifactCache) -> None:
            with cache.reserve("engine", "m/1", KEY) as entry:
                with entry.write() as folder:
                    (folder / "model.blob").write_bytes(b"compiled")
                raise ZeroDivisionError

        with ArtifactCache(tmp_path) as cache, pytest.raises(ZeroDivisionError):
            write_and_fail(cache)
        build = Builder()
        assert fetch(tmp_path, build) == b"compiled"
        assert build.calls == 0

    @pytest.mark.timeout(20)
    def test_others_wait_for_a_reservation(self, tmp_path: Path) -> None:
        events: list[str] = []

        def look() -> None:
            with ArtifactCache(tmp_path) as other, other.reserve("engine", "m/1", KEY) as entry:
                events.append("found" if entry.path else "missing")

        with ArtifactCache(tmp_path) as cache:
            with cache.reserve("engine", "m/1", KEY) as entry:
                thread = threading.Thread(target=look)
                thread.start()
                thread.join(0.2)
                events.append("decided")
                with entry.write() as folder:
                    (folder / "model.blob").write_bytes(b"compiled")
            thread.join()
        assert events == ["decided", "found"]


def refusing(number: int) -> Any:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    return refuse


@pytest.fixture
def with_spare(tmp_path: Path) -> Iterator[ArtifactCache]:
    """A cache as servers use it."""
    spare = ArtifactCache(tmp_path / "spare", lasting=False)
    with ArtifactCache(tmp_path / "cache", spare=spare) as cache:
        yield cache


class TestSpare:
    FAULTS = (errno.ENOSPC, errno.EROFS, errno.EACCES, errno.ENOLCK)

    @pytest.mark.parametrize("number", FAULTS)
    @pytest.mark.parametrize("what", ["folders", "lock", "entry"])
    def test_spare_cache_is_used_on_any_fault(
        self, with_spare: ArtifactCache, monkeypatch: pytest.MonkeyPatch, number: int, what: str, logged: list[str]
    ) -> None:
        original = {"folders": ArtifactCache._make_folders, "lock": fcntl.flock, "entry": Entry.write}[what]

        def fail(*arguments: Any) -> None:
            if what != "lock":
                about = str(arguments[1] if what == "entry" else arguments[0].folder)
            else:
                file = arguments[0]
                about = str(Path(f"/proc/self/fd/{file if isinstance(file, int) else file.fileno()}").readlink())
            if about.startswith(str(with_spare.folder)):
                raise OSError(number, os.strerror(number))
            original(*arguments)

        target = {"folders": (ArtifactCache, "_make_folders"), "lock": (fcntl, "flock"), "entry": (Entry, "write")}
        monkeypatch.setattr(*target[what], fail)
        build = Builder()
        path = with_spare.get("engine", "m/1", KEY, build)
        assert (path / "model.blob").read_bytes() == b"compiled"
        assert path.is_relative_to(with_spare.folder.with_name("spare"))
        with_spare.get("engine", "m/1", {**KEY, "graph": "other"}, build)
        assert [line for line in logged if line.startswith("served without the artifact cache: ")] == logged
        assert len(logged) == 1

    def test_lasting_artifacts_are_not_built_in_the_spare_cache(
        self, with_spare: ArtifactCache, monkeypatch: pytest.MonkeyPatch, logged: list[str]
    ) -> None:
        monkeypatch.setattr(ArtifactCache, "_make_folders", refusing(errno.ENOSPC))
        build = Builder()
        assert with_spare.get_lasting("engine", "m/1", KEY, build) is None
        assert build.calls == 0
        assert len(logged) == 1

    def test_cache_removed_while_in_use(self, with_spare: ArtifactCache) -> None:
        path = with_spare.get("engine", "m/1", KEY, Builder())
        shutil.rmtree(with_spare.folder)
        other = with_spare.get("engine", "m/1", {**KEY, "graph": "other"}, Builder())
        assert (other / "model.blob").read_bytes() == b"compiled"
        assert not path.exists()

    def test_unreadable_disk(
        self, with_spare: ArtifactCache, monkeypatch: pytest.MonkeyPatch, logged: list[str]
    ) -> None:
        path = with_spare.get("engine", "m/1", KEY, Builder())
        with_spare.close()
        read = store.sha256_of

        def fail(file: Path) -> str:
            if file.is_relative_to(path):
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            return read(file)

        monkeypatch.setattr(store, "sha256_of", fail)
        monkeypatch.setattr(ArtifactCache, "_discard", refusing(errno.EIO))
        assert (with_spare.get("engine", "m/1", KEY, Builder()) / "model.blob").read_bytes() == b"compiled"
        assert any("cannot be read: Input/output error" in line for line in logged)

    def test_entry_that_others_can_write_is_discarded(self, tmp_path: Path, logged: list[str]) -> None:
        fetch(tmp_path, Builder())
        (entry_of(tmp_path) / "model.blob").chmod(0o666)
        build = Builder()
        assert fetch(tmp_path, build) == b"compiled"
        assert build.calls == 1
        assert "can be written by other users" in logged[0]


def test_leftovers_of_dead_builds_are_removed(tmp_path: Path) -> None:
    fetch(tmp_path, Builder())
    (tmp_path / "partial" / "engine-dead").mkdir()
    other = {**KEY, "graph": "other"}
    with ArtifactCache(tmp_path) as cache, cache.reserve("engine", "m/1", other) as entry, entry.write() as building:
        ArtifactCache(tmp_path).remove_unfinished()
        assert list((tmp_path / "partial").iterdir()) == [building]
    assert len(list((tmp_path / "entries").iterdir())) == 2


def test_entry_of_another_release_is_kept(tmp_path: Path) -> None:
    """During a rolling update two releases share a folder."""
    fetch(tmp_path, Builder())
    path = entry_of(tmp_path)
    document = json.loads((path / "entry.json").read_text())
    (path / "entry.json").write_text(json.dumps({**document, "signed_by": "me"}))
    fetch(tmp_path, Builder(), {**KEY, "graph": "other"}, limit_bytes=1)
    with ArtifactCache(tmp_path) as cache:
        cache.prune(0)
    assert (path / "model.blob").read_bytes() == b"compiled"


class TestLayout:
    def test_files_of_an_entry(self, tmp_path: Path) -> None:
        fetch(tmp_path, Builder())
        name = entry_name("engine", KEY)
        files = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*"))
        assert files == [
            "entries",
            f"entries/{name}",
            f"entries/{name}/entry.json",
            f"entries/{name}/model.blob",
            "locks",
            f"locks/{name}",
            "partial",
        ]


class TestOneProcess:
    def test_entry_is_verified_once(self, cache: ArtifactCache) -> None:
        path = cache.get("engine", "m/1", KEY, Builder())
        damage(path, "flipped")
        assert cache.get("engine", "m/1", KEY, Builder()) == path

    def test_entry_is_verified_again_after_close(self, tmp_path: Path) -> None:
        build = Builder()
        cache = ArtifactCache(tmp_path)
        damage(cache.get("engine", "m/1", KEY, build), "flipped")
        cache.close()
        cache.get("engine", "m/1", KEY, build)
        cache.close()
        assert build.calls == 2

    def test_no_file_stays_open(self, tmp_path: Path) -> None:
        before = open_files()
        with ArtifactCache(tmp_path) as cache:
            for number in range(5):
                cache.get("engine", "m/1", {**KEY, "graph": str(number)}, Builder())
        assert open_files() == before

    def test_failed_pruning_is_logged(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, logged: list[str]) -> None:
        def fail(*_: object) -> list[Path]:
            raise OSError(errno.EACCES, os.strerror(errno.EACCES))

        monkeypatch.setattr(ArtifactCache, "_prune", fail)
        assert fetch(tmp_path, Builder()) == b"compiled"
        assert logged == [f"cannot prune {tmp_path}: [Errno 13] Permission denied"]


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


def test_entry_used_by_a_read_only_container_is_not_pruned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another container on the same node can write and prune the cache."""
    fetch(tmp_path, Builder())
    with ArtifactCache(tmp_path) as reader, ArtifactCache(tmp_path) as writer:
        with monkeypatch.context() as read_only:
            read_only.setattr(ArtifactCache, "_make_folders", refusing(errno.EROFS))
            path = reader.get("engine", "m/1", KEY, Builder())
        assert writer.prune(0) == []
        assert (path / "model.blob").read_bytes() == b"compiled"
    with ArtifactCache(tmp_path) as writer:
        assert writer.prune(0) == [path]


@pytest.mark.timeout(60)
def test_long_wait_is_logged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, logged: list[str]) -> None:
    """A paused container keeps its lock."""
    monkeypatch.setattr(store, "wait_for_lock", partial(wait_for_lock, long_s=0.01))
    with ArtifactCache(tmp_path) as cache, cache.reserve("engine", "other", KEY):
        thread = threading.Thread(target=fetch, args=(tmp_path, Builder()))
        thread.start()
        while not logged:
            time.sleep(0.01)
    thread.join()
    name = entry_name("engine", KEY)
    assert logged == [f"m/1 waits for another process or container that builds '{name}' of the artifact cache"]


def test_many_processes_build_once(tmp_path: Path) -> None:
    workers = [PROCESSES.Process(target=build_slowly, args=(tmp_path / "c", tmp_path / "log")) for _ in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
    assert [worker.exitcode for worker in workers] == [0] * 4
    assert (tmp_path / "log").read_text() == "built\n"


def test_killed_build_leaves_no_entry(tmp_path: Path) -> None:
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


ENTRY_KEY = {"graph": "abc", "device": "cpu"}


def write_entry(folder: Path, entry: Entry, **files: bytes) -> Path:
    """An entry with files, under its own name."""
    path = folder / entry.name
    path.mkdir()
    for name, content in files.items():
        (path / name).write_bytes(content)
    records = {name: FileRecord.of(path / name) for name in files}
    Entry(kind=entry.kind, model=entry.model, key=entry.key, files=records, seconds=1.5).write(path)
    return path


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return write_entry(tmp_path, Entry(kind="engine", model="m/1", key=ENTRY_KEY), blob=b"compiled")


class TestName:
    def test_name_of_an_entry(self) -> None:
        digest = hashlib.sha256(b'{"device": "cpu", "graph": "abc", "kind": "engine"}').hexdigest()
        assert entry_name("engine", ENTRY_KEY) == f"engine-{digest[:40]}"
        assert Entry(kind="engine", model="m/1", key=ENTRY_KEY).name == entry_name("engine", ENTRY_KEY)


class TestEntry:
    def test_entry_round_trip(self, path: Path) -> None:
        entry = read_entry(path)
        assert entry is not None
        assert (entry.kind, entry.model, entry.key, entry.seconds) == ("engine", "m/1", ENTRY_KEY, 1.5)
        assert entry.files == {"blob": FileRecord(bytes=8, sha256=hashlib.sha256(b"compiled").hexdigest())}

    @pytest.mark.parametrize(
        "text",
        [
            "",
            "null",
            '{"kind": "engine", "model": "m"}',
            '{"kind": "engine", "model": "m", "key": {"a": 1}, "files": {}, "seconds": 0.0}',
            '{"kind": "engine", "model": "m", "key": {}, "files": {"f": {}}, "seconds": 0.0}',
            '{"kind": "engine", "model": "m", "key": {}, "files": {}, "seconds": 0.0, "more": 1}',
            "\xff",
        ],
    )
    def test_invalid_entry(self, path: Path, text: str) -> None:
        (path / "entry.json").write_text(text, encoding="latin-1")
        assert read_entry(path) is None
        assert find_fault(path) == "entry.json cannot be read"


class TestFaults:
    def test_entry_with_another_key(self, path: Path) -> None:
        assert find_fault(path, {**ENTRY_KEY, "graph": "def"}) == "its key does not match"
        assert find_fault(path, {}) == "its key does not match"

    @pytest.mark.parametrize("name", ["../secret", "/etc/passwd", "below/blob", "..", ""])
    def test_files_outside_the_entry_are_not_opened(self, path: Path, name: str) -> None:
        document = json.loads((path / "entry.json").read_text())
        document["files"] = {name: {"bytes": 1, "sha256": "0"}}
        (path / "entry.json").write_text(json.dumps(document))
        fault = find_fault(path)
        assert fault is not None
        assert "outside of the entry" in fault or "Is a directory" in fault
