"""No process of a conversion or an admission outlives the one that it works for."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path

import psutil
import pytest

from graphkiln_backend.lowering.parentage import keep_temporary_files_in, worker
from graphkiln_backend.system.processes import is_gone

PROGRAM = """
import sys, time
from multiprocessing import get_context
from graphkiln_backend.lowering.parentage import end_with_parent

def work(bound, ready):
    if bound:
        end_with_parent()
    ready.put(None)
    time.sleep(20)

if __name__ == "__main__":
    context = get_context("spawn")
    ready = context.Queue()
    process = context.Process(target=work, args=(sys.argv[1] == "bound", ready), daemon=True)
    process.start()
    ready.get()
    print(process.pid, flush=True)
    time.sleep(20)
"""


def has_ended(process: psutil.Process) -> bool:
    return is_gone(process.pid)


def start_and_kill(folder: Path, how: str) -> psutil.Process:
    (folder / "program.py").write_text(PROGRAM)
    command = [sys.executable, str(folder / "program.py"), how]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        worker = psutil.Process(int(parent.stdout.readline()))
        parent.kill()
    return worker


def test_a_worker_ends_with_a_parent_that_is_killed(tmp_path: Path) -> None:
    worker = start_and_kill(tmp_path, "bound")
    deadline = time.monotonic() + 10
    while not has_ended(worker):
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.slow
def test_without_it_a_worker_goes_on(tmp_path: Path) -> None:
    worker = start_and_kill(tmp_path, "free")
    time.sleep(0.5)
    assert not has_ended(worker)
    worker.kill()


def test_a_worker_sends_what_comes_of_its_work() -> None:
    with worker(Connection.send, ("reason", "words")) as (receiver, process):
        assert receiver.recv() == ("reason", "words")
    assert receiver.closed
    assert not process.is_alive()


def test_the_working_folder_holds_no_module_of_a_workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("pickle", "queue", "socket"):
        (tmp_path / f"{name}.py").write_text("raise ImportError('of somebody else')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PYTHONSAFEPATH", raising=False)
    with worker(Connection.send, ("reason", "words")) as (receiver, _):
        assert receiver.recv() == ("reason", "words")
    assert "PYTHONSAFEPATH" not in os.environ


def test_a_worker_that_ends_without_a_word_is_noticed() -> None:
    with worker(Connection.close) as (receiver, _), pytest.raises(EOFError):
        receiver.recv()


def test_a_worker_ends_with_its_block() -> None:
    with worker(Connection.send, bytes(1 << 22)) as (receiver, process):
        assert receiver.poll(30), "it is sending, and nobody receives: that never ends"
    assert process.exitcode == -signal.SIGKILL


def test_what_cannot_be_started_leaves_nothing_open() -> None:
    before = psutil.Process().num_fds()
    with pytest.raises(Exception, match="pickle"), worker(lambda _: None):
        pass
    assert psutil.Process().num_fds() <= before


def test_libraries_find_the_folder_for_temporary_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setenv("TMPDIR", "/elsewhere")
    keep_temporary_files_in(str(tmp_path))
    assert tempfile.gettempdir() == os.environ["TMPDIR"] == str(tmp_path)
