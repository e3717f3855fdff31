"""File locks: exclusive, shared, and released by killed processes."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from graphkiln_backend.system.locks import lock, lock_shared, locked, try_lock

HOLDER = """
import sys
from graphkiln_backend.system import locks
file = open(sys.argv[1])
getattr(locks, sys.argv[2])(file)
print("held", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "lock").touch()
    return tmp_path / "lock"


@contextmanager
def held_elsewhere(path: Path, kind: str) -> Iterator[subprocess.Popen[str]]:
    """Hold a lock in another process until the end of the block."""
    command = [sys.executable, "-c", HOLDER, str(path), kind]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        assert process.stdout.readline() == "held\n"
        yield process
        process.kill()


def test_lock_is_held_until_its_process_is_killed(path: Path) -> None:
    with held_elsewhere(path, "lock") as process, path.open() as file:
        assert not try_lock(file)
        with locked(path) as mine:
            assert not mine
        process.kill()
        process.wait()
        assert try_lock(file)


def test_shared_locks_exclude_only_exclusive_ones(path: Path) -> None:
    with held_elsewhere(path, "lock_shared"), path.open() as file, path.open() as other:
        lock_shared(file)
        assert not try_lock(other)


def test_locked_creates_and_unlocks_a_file(path: Path) -> None:
    new = path.with_name("new")
    with locked(new, os.O_RDWR | os.O_CREAT) as mine:
        assert mine
        with locked(new) as again:
            assert not again
    with new.open() as file:
        lock(file)
