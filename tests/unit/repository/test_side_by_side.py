"""Calls side by side: each is made, the first error counts, and none keeps a process that is told to end."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest

from graphkiln_backend.repository.remote_files import call_each

TOLD_TO_END = """
import os, signal, sys, threading
from graphkiln_backend.repository.remote_files import call_each

def end(*_):
    raise SystemExit(7)

def hang(item):
    print("called", item, flush=True)
    os.kill(os.getpid(), signal.SIGTERM)
    threading.Event().wait()

signal.signal(signal.SIGTERM, end)
call_each(hang, range(9), 1)
"""


def test_each_is_called_once() -> None:
    seen: list[int] = []
    call_each(seen.append, range(100), 4)
    assert sorted(seen) == list(range(100))
    call_each(seen.append, [], 4)
    assert len(seen) == 100


def test_so_many_run_at_once() -> None:
    together = threading.Barrier(3)  # each waits for two others: fewer would wait for ever
    call_each(lambda _: together.wait(60), range(6), 3)


def test_the_first_error_is_raised_and_nothing_is_begun_after_it() -> None:
    seen: list[int] = []

    def fail_at_two(item: int) -> None:
        seen.append(item)
        if item == 2:
            raise OSError("no room")

    with pytest.raises(OSError, match="no room"):
        call_each(fail_at_two, range(9), 1)
    assert seen == [0, 1, 2]


def test_calls_that_never_end_keep_no_process_that_is_told_to() -> None:
    ended = subprocess.run([sys.executable, "-c", TOLD_TO_END], capture_output=True, text=True, check=False, timeout=60)
    assert (ended.returncode, ended.stdout) == (7, "called 0\n"), ended.stderr
