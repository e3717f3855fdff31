"""No process outlives the supervisor, and no zombie stays with it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import psutil
import pytest
from waiting import wait_until

from graphkiln_backend.system import processes as module
from graphkiln_backend.system.processes import Guard, Reaper, is_gone, kill_group


@pytest.fixture
def server() -> Iterator[subprocess.Popen[bytes]]:
    """The leader of a group, with a child."""
    command = ["/bin/sh", "-c", "sleep 60 & echo; sleep 60"]
    with subprocess.Popen(command, start_new_session=True, stdout=subprocess.PIPE) as server:
        assert server.stdout is not None
        server.stdout.readline()
        yield server
        kill_group(server)


def has_ended(process: psutil.Process) -> bool:
    return is_gone(process.pid)


def test_a_group_is_killed_whatever_state_it_is_in(server: subprocess.Popen[bytes]) -> None:
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


def test_a_guarded_group_ends_with_a_process_that_is_killed() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", GUARDED], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as supervisor:
        assert supervisor.stdout is not None
        pids = [int(supervisor.stdout.readline()) for _ in range(2)]
        group = [psutil.Process(pid) for pid in pids]
        supervisor.kill()
    wait_until(lambda: all(map(has_ended, group)))


def test_a_guard_that_is_closed_kills_nobody(server: subprocess.Popen[bytes]) -> None:
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

    def test_a_zombie_that_nobody_waits_for_is_reaped(
        self, zombie: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(module, "_ABANDONED_S", 0.1)
        monkeypatch.setattr(os, "getpid", lambda: 1)
        monkeypatch.setattr(module.psutil, "Process", lambda: _Parent(zombie.pid))
        reaper = Reaper()
        reaper.reap()
        assert psutil.pid_exists(zombie.pid), "its own parent may be about to wait for it"
        time.sleep(0.15)
        reaper.reap()
        assert not psutil.pid_exists(zombie.pid)

    def test_only_the_first_process_of_a_container_inherits_orphans(
        self, zombie: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(module, "_ABANDONED_S", -1.0)
        Reaper().reap()
        assert psutil.pid_exists(zombie.pid)


class _Parent:
    """A process with one child."""

    def __init__(self, child: int) -> None:
        self._child = child

    def children(self) -> list[_Zombie]:
        return [_Zombie(self._child)]


class _Zombie:
    def __init__(self, pid: int) -> None:
        self.pid = pid

    def status(self) -> str:
        return psutil.STATUS_ZOMBIE
