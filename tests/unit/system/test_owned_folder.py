"""Temporary folders whose owners live or are dead."""

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


def test_the_owner_lives_until_it_closes_the_folder(tmp_path: Path) -> None:
    with OwnedFolder(tmp_path) as folder:
        assert owned_folders(tmp_path) == [folder.path]
        assert not is_dead(folder.path)
        assert folder.path.stat().st_mode & 0o077 == 0
    assert list(tmp_path.iterdir()) == []


def test_a_process_that_dies_leaves_a_folder_that_says_so(tmp_path: Path) -> None:
    path = left_by_a_dead_process(tmp_path)
    assert owned_folders(tmp_path) == [path]
    assert is_dead(path)


def test_programs_that_the_owner_starts_do_not_hold_its_lock(tmp_path: Path) -> None:
    with OwnedFolder(tmp_path) as folder, subprocess.Popen(["sleep", "60"]) as child:
        os.close(folder._lock)
        folder._lock = -1
        assert is_dead(folder.path)
        child.kill()


def test_only_one_at_a_time_finds_an_owner_dead(tmp_path: Path) -> None:
    path = left_by_a_dead_process(tmp_path)
    with locked_if_dead(path) as first:
        assert first
        assert not is_dead(path)
    assert is_dead(path)


def test_what_another_has_just_removed_is_not_dead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = left_by_a_dead_process(tmp_path)
    lock = module._can_lock

    def remove_then_lock(descriptor: int) -> bool:
        remove_owned(path)
        return lock(descriptor)

    monkeypatch.setattr(module, "_can_lock", remove_then_lock)
    assert not is_dead(path)


def test_what_belongs_to_another_user_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = left_by_a_dead_process(tmp_path)
    monkeypatch.setattr(os, "geteuid", lambda: path.stat().st_uid + 1)
    assert not is_dead(path)


def test_links_lead_nowhere(tmp_path: Path) -> None:
    path = left_by_a_dead_process(tmp_path)
    link = tmp_path / "graphkiln-link"
    link.symlink_to(path)
    assert not is_dead(link)


def test_where_locks_are_not_known_nothing_is_dead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    path = left_by_a_dead_process(tmp_path)
    monkeypatch.setattr(fcntl, "flock", refuse)
    assert not is_dead(path)
    with OwnedFolder(tmp_path) as folder:
        assert folder.path.is_dir()


def test_a_folder_without_owner_file_is_nobodys_business(tmp_path: Path) -> None:
    (tmp_path / "graphkiln-notes").mkdir()
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / OWNER_FILE).touch()
    assert owned_folders(tmp_path) == []


def test_what_an_interrupted_removal_leaves_still_had_an_owner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    path = left_by_a_dead_process(tmp_path)
    (path / "folder").mkdir()
    monkeypatch.setattr(module.shutil, "rmtree", interrupt)
    with pytest.raises(KeyboardInterrupt):
        remove_owned(path)
    assert owned_folders(tmp_path) == [path]


def test_a_file_is_locked_from_the_first_moment_that_it_has_its_name(tmp_path: Path) -> None:
    descriptor = create_locked(tmp_path / "owner")
    assert [path.name for path in tmp_path.iterdir()] == ["owner"]
    assert not is_dead(tmp_path / "owner")
    os.close(descriptor)
    assert is_dead(tmp_path / "owner")


@pytest.mark.parametrize(
    ("number", "words"), [(errno.ENOSPC, "make room there"), (errno.EROFS, "TMPDIR to a folder that can be written")]
)
def test_a_folder_that_cannot_be_made_is_one_line_with_the_fix_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, words: str
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(Path, "write_text", fail)
    with pytest.raises(ServerSetupError, match="cannot make a temporary folder") as raised:
        OwnedFolder(tmp_path)
    assert words in raised.value.hint
    assert list(tmp_path.iterdir()) == []


def test_only_what_the_dead_left_is_removed_and_only_with_the_prefix(tmp_path: Path) -> None:
    dead = left_by_a_dead_process(tmp_path)
    with OwnedFolder(tmp_path) as living:
        remove_dead(tmp_path, "other-")
        assert dead.is_dir()
        remove_dead(tmp_path)
        assert [path.name for path in tmp_path.iterdir()] == [living.path.name]
