"""Owned temporary folders: detecting dead owners, and removal."""

from __future__ import annotations

import errno
import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest

from graphkiln_backend.graph.errors import ServerSetupError
from graphkiln_backend.system import owned_folder as module
from graphkiln_backend.system.owned_folder import (
    OWNER_FILE,
    OwnedFolder,
    create_locked,
    locked_if_dead,
    owned_folders,
    remove_dead,
    remove_owned,
)

DIE_WITHIN = """
import os, sys
from pathlib import Path
from graphkiln_backend.system.owned_folder import OwnedFolder
print(OwnedFolder(Path(sys.argv[1])).path, flush=True)
os._exit(9)
"""


def left_by_a_dead_process(parent: Path) -> Path:
    finished = subprocess.run(
        [sys.executable, "-c", DIE_WITHIN, str(parent)], capture_output=True, text=True, check=False, timeout=60
    )
    assert finished.returncode == 9, finished.stderr
    return Path(finished.stdout.strip())


def is_dead(path: Path) -> bool:
    with locked_if_dead(path) as dead:
        return dead


def test_owner_is_alive_until_the_folder_is_closed(tmp_path: Path) -> None:
    with OwnedFolder(tmp_path) as folder:
        assert owned_folders(tmp_path) == [folder.path]
        assert not is_dead(folder.path)
        assert folder.path.stat().st_mode & 0o077 == 0
    assert list(tmp_path.iterdir()) == []


def test_folder_of_a_dead_process_is_recognized(tmp_path: Path) -> None:
    path = left_by_a_dead_process(tmp_path)
    assert owned_folders(tmp_path) == [path]
    assert is_dead(path)


def test_child_processes_do_not_inherit_the_lock(tmp_path: Path) -> None:
    with OwnedFolder(tmp_path) as folder, subprocess.Popen(["sleep", "60"]) as child:
        os.close(folder._lock)
        folder._lock = -1
        assert is_dead(folder.path)
        child.kill()


def test_only_one_process_at_a_time_locks_a_dead_owners_folder(tmp_path: Path) -> None:
    path = left_by_a_dead_process(tmp_path)
    with locked_if_dead(path) as first:
        assert first
        assert not is_dead(path)
    assert is_dead(path)


def test_folder_removed_meanwhile_is_not_reported_dead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = left_by_a_dead_process(tmp_path)
    lock = module._can_lock

    def remove_then_lock(descriptor: int) -> bool:
        remove_owned(path)
        return lock(descriptor)

    monkeypatch.setattr(module, "_can_lock", remove_then_lock)
    assert not is_dead(path)


def test_folder_of_another_user_is_not_reported_dead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = left_by_a_dead_process(tmp_path)
    monkeypatch.setattr(os, "geteuid", lambda: path.stat().st_uid + 1)
    assert not is_dead(path)


def test_symbolic_link_is_not_reported_dead(tmp_path: Path) -> None:
    path = left_by_a_dead_process(tmp_path)
    link = tmp_path / "graphkiln-link"
    link.symlink_to(path)
    assert not is_dead(link)


def test_file_system_without_locks_reports_nothing_dead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    path = left_by_a_dead_process(tmp_path)
    monkeypatch.setattr(fcntl, "flock", refuse)
    assert not is_dead(path)
    with OwnedFolder(tmp_path) as folder:
        assert folder.path.is_dir()


def test_folder_without_owner_file_is_ignored(tmp_path: Path) -> None:
    (tmp_path / "graphkiln-notes").mkdir()
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / OWNER_FILE).touch()
    assert owned_folders(tmp_path) == []


def test_interrupted_removal_keeps_the_owner_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    path = left_by_a_dead_process(tmp_path)
    (path / "folder").mkdir()
    monkeypatch.setattr(module.shutil, "rmtree", interrupt)
    with pytest.raises(KeyboardInterrupt):
        remove_owned(path)
    assert owned_folders(tmp_path) == [path]


def test_create_locked_locks_before_the_file_has_a_name(tmp_path: Path) -> None:
    descriptor = create_locked(tmp_path / "owner")
    assert [path.name for path in tmp_path.iterdir()] == ["owner"]
    assert not is_dead(tmp_path / "owner")
    os.close(descriptor)
    assert is_dead(tmp_path / "owner")


@pytest.mark.parametrize(
    ("number", "words"), [(errno.ENOSPC, "free space"), (errno.EROFS, "TMPDIR to a writable folder")]
)
def test_failed_creation_suggests_a_fix_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, words: str
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(Path, "write_text", fail)
    with pytest.raises(ServerSetupError, match="cannot make a temporary folder") as raised:
        OwnedFolder(tmp_path)
    assert words in raised.value.hint
    assert list(tmp_path.iterdir()) == []


def test_remove_dead_removes_only_dead_folders_with_the_prefix(tmp_path: Path) -> None:
    dead = left_by_a_dead_process(tmp_path)
    with OwnedFolder(tmp_path) as living:
        remove_dead(tmp_path, "other-")
        assert dead.is_dir()
        remove_dead(tmp_path)
        assert [path.name for path in tmp_path.iterdir()] == [living.path.name]
