"""A folder as a store: exclusive and durable writes, faults, killed writers."""

from __future__ import annotations

import errno
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from graphkiln_backend.scoring.destinations import folder
from graphkiln_backend.scoring.destinations.folder import FolderStore
from graphkiln_backend.scoring.errors import ScoringError, StoreError

CONTENT = memoryview(b"content")


@pytest.fixture
def store(tmp_path: Path) -> FolderStore:
    made = FolderStore(tmp_path / "out")
    made.prepare()
    return made


def refusing(number: int) -> Any:
    def fail(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    return fail


def test_file_and_folder_are_synchronized(store: FolderStore, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    synced = []
    original = os.fsync

    def fsync(descriptor: int) -> None:
        synced.append(Path(f"/proc/self/fd/{descriptor}").readlink())
        original(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    store.create("a", CONTENT)
    assert synced[0].name.startswith(".unfinished-")
    assert synced[1] == tmp_path / "out"


@pytest.mark.parametrize("number", [errno.EINVAL, errno.EOPNOTSUPP])
def test_file_system_without_folder_sync_is_accepted(
    store: FolderStore, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    original = os.fsync
    monkeypatch.setattr(
        os, "fsync", lambda each: refusing(number)() if Path(f"/proc/self/fd/{each}").is_dir() else original(each)
    )
    assert store.create("a", CONTENT)


class TestNoLinks:
    """File systems without hard links."""

    def test_exclusive_rename_is_used(
        self, store: FolderStore, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        monkeypatch.setattr(os, "link", refusing(errno.EPERM))
        store.prepare()
        assert store.create("a", CONTENT)
        assert not store.create("a", memoryview(b"other"))
        assert store.read("a") == b"content"
        assert [path.name for path in (tmp_path / "out").iterdir()] == ["a"]

    def test_without_exclusive_renames_it_is_refused(
        self, store: FolderStore, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        class Library:
            def renameat2(self, *_: object) -> int:
                import ctypes

                ctypes.set_errno(errno.EINVAL)
                return -1

        monkeypatch.setattr(os, "link", refusing(errno.EPERM))
        monkeypatch.setattr(folder.ctypes, "CDLL", lambda *_, **__: Library())
        with pytest.raises(ScoringError, match=r"neither links nor renames.*choose another file system"):
            store.prepare()
        assert list((tmp_path / "out").iterdir()) == []

    def test_links_that_replace_are_noticed(self, store: FolderStore, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(os, "link", lambda old, new: Path(new).write_bytes(Path(old).read_bytes()))
        with pytest.raises(ScoringError, match="lets two writers create the same file"):
            store.prepare()


def test_link_reported_as_existing_by_a_retry_is_recognized(
    store: FolderStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = os.link

    def link(old: Path, new: Path) -> None:
        original(old, new)
        raise FileExistsError(errno.EEXIST, "asked twice")

    monkeypatch.setattr(os, "link", link)
    assert store.create("a", CONTENT)


@pytest.mark.parametrize(
    ("number", "expected"),
    [
        (errno.ENOSPC, ("make room there; the same command goes on", False)),
        (errno.EDQUOT, ("within the quota", False)),
        (errno.EROFS, ("for reading only", False)),
        (errno.EIO, ("Input/output error", True)),
        (errno.ESTALE, ("Stale", True)),
    ],
)
def test_disk_failure_is_a_store_error_and_leaves_no_file(
    store: FolderStore, monkeypatch: pytest.MonkeyPatch, number: int, expected: tuple[str, bool], tmp_path: Path
) -> None:
    words, passing = expected
    store.create("before", CONTENT)
    with monkeypatch.context() as broken:
        broken.setattr(os, "fsync", refusing(number))
        for write in (store.create, store.replace):
            with pytest.raises(StoreError, match=words) as raised:
                write("a", CONTENT)
            assert raised.value.passing is passing
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["before"]
    assert store.create("a", CONTENT)


def test_unmounted_folder_is_not_created(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="must be the same on all nodes"):
        FolderStore(tmp_path / "out").create("a", CONTENT)
    assert list(tmp_path.iterdir()) == []


def test_files_of_killed_writers_are_removed_by_age(store: FolderStore, tmp_path: Path) -> None:
    paths = [tmp_path / "out" / f".unfinished-{name}" for name in ("young", "old")]
    for path, age_s in zip(paths, (600, 7200), strict=True):
        path.touch()
        os.utime(path, (time.time() - age_s, time.time() - age_s))
    store.prepare()
    assert [path.exists() for path in paths] == [True, False]


WRITE = """
import sys
from pathlib import Path
from graphkiln_backend.scoring.destinations.folder import FolderStore
store, number = FolderStore(Path(sys.argv[1])), 0
print("writing", flush=True)
while True:
    store.create(f"{number:06}", memoryview(f"{number:06}".encode() * 100_000))
    number += 1
"""


def test_killed_writers_leave_whole_files_or_none(store: FolderStore, tmp_path: Path) -> None:
    moments = random.Random(7)
    for _ in range(4):
        with subprocess.Popen([sys.executable, "-c", WRITE, str(tmp_path / "out")], stdout=subprocess.PIPE) as writer:
            assert writer.stdout
            writer.stdout.readline()
            time.sleep(moments.uniform(0, 0.1))
            writer.send_signal(signal.SIGKILL)
        for name in store.names():
            assert store.read(name) == name.encode() * 100_000


@pytest.mark.skipif(os.getuid() != 0, reason="only root may mount a file system")
def test_full_disk_is_used_again_once_there_is_room(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", disk]
    if subprocess.run(command, check=False, capture_output=True).returncode:
        pytest.skip("this container may not mount a file system")
    try:
        store = FolderStore(disk)
        store.prepare()
        assert store.create("first", memoryview(bytes(600_000)))
        with pytest.raises(StoreError, match=r"No space left on device.*make room there") as raised:
            store.create("second", memoryview(bytes(600_000)))
        assert not raised.value.passing
        assert [path.name for path in disk.iterdir()] == ["first"]
        store.delete("first")
        assert store.create("second", memoryview(bytes(600_000)))
    finally:
        subprocess.run(["umount", disk], check=True)
