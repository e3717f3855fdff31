"""Locks on files, held against other processes and other openings of the same file."""

from __future__ import annotations

import fcntl
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from graphkiln_backend.cache.store import locked_alone, wait_for_lock

HOLD = """
import fcntl, sys
lock = open(sys.argv[1])
fcntl.flock(lock, fcntl.LOCK_SH)
print("locked", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "lock"
    path.touch()
    return path


def test_a_file_that_nobody_uses_is_locked(file: Path) -> None:
    with locked_alone(file, "a") as alone:
        assert alone
        with locked_alone(file, "a") as again:
            assert not again


def test_the_lock_ends_with_the_block(file: Path) -> None:
    for _ in range(2):
        with locked_alone(file, "a") as alone:
            assert alone


def test_the_lock_ends_with_a_block_that_fails(file: Path) -> None:
    with pytest.raises(ZeroDivisionError), locked_alone(file, "a"):
        raise ZeroDivisionError
    with locked_alone(file, "a") as alone:
        assert alone


def test_a_shared_lock_keeps_it_from_being_locked(file: Path) -> None:
    with file.open() as user:
        fcntl.flock(user, fcntl.LOCK_SH)
        with locked_alone(file, "r+b") as alone:
            assert not alone
    with locked_alone(file, "r+b") as alone:
        assert alone


def test_trying_takes_nothing_from_who_holds_it(file: Path) -> None:
    with file.open() as user:
        fcntl.flock(user, fcntl.LOCK_SH)
        with locked_alone(file, "a"), file.open() as other:
            fcntl.flock(other, fcntl.LOCK_SH | fcntl.LOCK_NB)


def test_the_kernel_takes_it_away_from_a_process_that_dies(file: Path) -> None:
    command = [sys.executable, "-c", HOLD, str(file)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        assert process.stdout.readline() == "locked\n"
        with locked_alone(file, "a") as alone:
            assert not alone
        process.kill()
        process.wait()
    with locked_alone(file, "a") as alone:
        assert alone


def test_a_file_that_is_not_there_is_made_or_told_by_its_mode(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError), locked_alone(tmp_path / "gone", "r+b"):
        pass
    with locked_alone(tmp_path / "new", "a") as alone:
        assert alone
    assert (tmp_path / "new").exists()


@pytest.mark.timeout(60)
def test_who_waits_long_says_so_once_and_has_the_lock_in_the_end(file: Path, logged: list[str]) -> None:
    got: list[bool] = []

    def wait() -> None:
        with file.open("a") as mine:
            wait_for_lock(mine, "m waits", long_s=0.01)
            with locked_alone(file, "a") as alone:
                got.append(alone)

    with locked_alone(file, "a") as alone:
        assert alone
        thread = threading.Thread(target=wait)
        thread.start()
        while not logged:
            time.sleep(0.01)
        assert got == []
    thread.join()
    assert got == [False]  # it has the lock itself
    assert logged == ["m waits"]


def test_a_lock_that_is_free_tells_nobody(file: Path, logged: list[str]) -> None:
    with file.open("a") as mine:
        wait_for_lock(mine, "m waits", long_s=0.0)
    assert logged == []
