"""Child processes: started, stopped, and ended with their parent."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from waiting import wait_until

from graphkiln_backend.system import processes as module
from graphkiln_backend.system.processes import (
    Guard,
    Reaper,
    is_gone,
    keep_temporary_files_in,
    kill_group,
    start,
    stop,
    worker,
)


@pytest.fixture
def server() -> Iterator[subprocess.Popen[bytes]]:
    """Leader of a process group with one child."""
    command = ["/bin/sh", "-c", "sleep 60 & echo; sleep 60"]
    with subprocess.Popen(command, start_new_session=True, stdout=subprocess.PIPE) as server:
        assert server.stdout is not None
        server.stdout.readline()
        yield server
        kill_group(server)


def has_ended(process: psutil.Process) -> bool:
    return is_gone(process.pid)


def test_kill_group_kills_stopped_processes(server: subprocess.Popen[bytes]) -> None:
    children = psutil.Process(server.pid).children()
    os.kill(children[0].pid, signal.SIGSTOP)
    server.send_signal(signal.SIGSTOP)
    kill_group(server)
    assert server.returncode == -signal.SIGKILL
    wait_until(lambda: all(map(has_ended, children)))
    kill_group(server)


GUARDED = """
import subprocess, sys
from graphkiln_backend.system.processes import Guard
command = ["/bin/sh", "-c", "sleep 60 & echo $!; kill -STOP $!; sleep 60"]
server = subprocess.Popen(command, start_new_session=True, stdout=subprocess.PIPE, text=True)
with Guard(server):
    print(f"{server.pid}\\n{server.stdout.readline()}", end="", flush=True)
    sys.stdin.read()
"""


def test_guard_kills_the_group_of_a_killed_supervisor() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", GUARDED], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as supervisor:
        assert supervisor.stdout is not None
        pids = [int(supervisor.stdout.readline()) for _ in range(2)]
        group = [psutil.Process(pid) for pid in pids]
        supervisor.kill()
    wait_until(lambda: all(map(has_ended, group)))


def test_closed_guard_kills_nothing(server: subprocess.Popen[bytes]) -> None:
    with Guard(server):
        pass
    time.sleep(0.2)
    assert server.poll() is None


class TestReaper:
    @pytest.fixture
    def zombie(self) -> Iterator[subprocess.Popen[bytes]]:
        with subprocess.Popen(["/bin/true"]) as process:
            os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
            yield process

    def test_abandoned_zombie_is_reaped(self, zombie: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(module, "_ABANDONED_S", 0.1)
        monkeypatch.setattr(os, "getpid", lambda: 1)
        real = psutil.Process
        parent = SimpleNamespace(children=lambda: [real(zombie.pid)])
        monkeypatch.setattr(module.psutil, "Process", lambda pid=0: real(pid) if pid else parent)
        reaper = Reaper()
        reaper.reap()
        assert psutil.pid_exists(zombie.pid), "its parent may still wait for it"
        time.sleep(0.15)
        reaper.reap()
        assert not psutil.pid_exists(zombie.pid)

    def test_only_pid_1_reaps(self, zombie: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(module, "_ABANDONED_S", -1.0)
        Reaper().reap()
        assert psutil.pid_exists(zombie.pid)


def test_start_uses_a_new_session_and_one_log(tmp_path: Path) -> None:
    with (tmp_path / "log").open("wb") as log:
        process = start(["/bin/sh", "-c", "echo out; echo err >&2; cat"], log=log)
    assert process.wait(10) == 0, "stdin is closed"
    assert (tmp_path / "log").read_text() == "out\nerr\n"
    process = start(["/bin/sleep", "60"])
    assert os.getsid(process.pid) == process.pid
    assert stop(process, 10) == -signal.SIGTERM


def test_stop_kills_the_group_of_a_program_that_ignores_sigterm() -> None:
    command = ["/bin/sh", "-c", "trap '' TERM; sleep 60 & echo; wait; sleep 60"]
    process = start(command, stdout=subprocess.PIPE)
    assert process.stdout is not None
    with process.stdout as output:
        output.readline()
        children = psutil.Process(process.pid).children()
        assert stop(process, 0.1) == -signal.SIGKILL
    wait_until(lambda: all(map(has_ended, children)))


ENDING = """
import signal, sys
from graphkiln_backend.system.processes import start
start(["/bin/sh", "-c", "echo $$; exec sleep 60"], at_our_end=signal.SIGTERM)
sys.stdin.read()
"""


def test_program_ends_with_its_parent() -> None:
    command = [sys.executable, "-c", ENDING]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        program = psutil.Process(int(parent.stdout.readline()))
        parent.kill()
    wait_until(lambda: has_ended(program))


# Workers end with their parent.

PROGRAM = """
import sys, time
from multiprocessing import get_context
from graphkiln_backend.system.processes import end_with_parent

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


def start_and_kill(folder: Path, how: str) -> psutil.Process:
    (folder / "program.py").write_text(PROGRAM)
    command = [sys.executable, str(folder / "program.py"), how]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        worker = psutil.Process(int(parent.stdout.readline()))
        parent.kill()
    return worker


def test_worker_ends_with_a_killed_parent(tmp_path: Path) -> None:
    worker = start_and_kill(tmp_path, "bound")
    deadline = time.monotonic() + 10
    while not has_ended(worker):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_worker_does_not_import_from_the_working_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("pickle", "queue", "socket"):
        (tmp_path / f"{name}.py").write_text("raise ImportError('shadowed')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PYTHONSAFEPATH", raising=False)
    with worker(Connection.send, ("reason", "words")) as (receiver, _):
        assert receiver.recv() == ("reason", "words")
    assert "PYTHONSAFEPATH" not in os.environ


def test_worker_that_sends_nothing_raises_eof() -> None:
    with worker(Connection.close) as (receiver, _), pytest.raises(EOFError):
        receiver.recv()


def test_worker_is_killed_at_the_end_of_the_block() -> None:
    with worker(Connection.send, bytes(1 << 22)) as (receiver, process):
        assert receiver.poll(30), "the worker blocks in send"
    assert process.exitcode == -signal.SIGKILL


def test_failed_start_closes_the_pipe() -> None:
    before = psutil.Process().num_fds()
    with pytest.raises(Exception, match="pickle"), worker(lambda _: None):
        pass
    assert psutil.Process().num_fds() <= before


def test_temporary_folder_of_libraries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setenv("TMPDIR", "/elsewhere")
    keep_temporary_files_in(str(tmp_path))
    assert tempfile.gettempdir() == os.environ["TMPDIR"] == str(tmp_path)
