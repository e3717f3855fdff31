"""The server's processes: ended with it, and with the supervisor, in whatever state they are."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from contextlib import suppress
from typing import TYPE_CHECKING

from graphkiln_backend.graph.modules import LazyModule
from graphkiln_backend.system.closing import Closeable

if TYPE_CHECKING:
    import psutil
else:
    psutil = LazyModule("psutil")

_ABANDONED_S = 10.0
_WATCH_PIPE = 'read -r _; kill -s KILL -- "-$1"'


def is_gone(pid: int) -> bool:
    """Whether a process has ended, also where its parent has not asked how."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def kill_group(server: subprocess.Popen[bytes]) -> None:
    """Kills a server and its stubs, whatever state they are in; the server must lead a process group."""
    with suppress(ProcessLookupError):
        os.killpg(server.pid, signal.SIGKILL)
    server.wait()


class Guard(Closeable):
    """A process that kills the server and its stubs when this process is gone, however that came.

    tritonserver itself asks the kernel for SIGKILL at its parent's death; its stubs look after their parent only while
    they run. The guard waits at a pipe whose other end is held by this process alone.

    Args:
        server: The leader of a process group.
    """

    def __init__(self, server: subprocess.Popen[bytes]) -> None:
        self._process = subprocess.Popen(
            ["/bin/sh", "-c", _WATCH_PIPE, "graphkiln-guard", str(server.pid)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def close(self) -> None:
        """Ends the guard first, so that it does nothing."""
        self._process.kill()
        self._process.wait()
        if self._process.stdin:
            self._process.stdin.close()


class Reaper:
    """Takes the exit status of children that are not ours: PID 1 of a container inherits every orphan.

    A zombie that nobody has waited for in `_ABANDONED_S` was not started by this program.
    """

    def __init__(self) -> None:
        self._since: dict[int, float] = {}

    def reap(self) -> None:
        """To be called about once a second."""
        if os.getpid() != 1:
            return
        now = time.monotonic()
        zombies = {child.pid for child in psutil.Process().children() if _is_zombie(child)}
        self._since = {pid: self._since.get(pid, now) for pid in zombies}
        for pid, since in self._since.items():
            if now - since > _ABANDONED_S:
                with suppress(ChildProcessError):
                    os.waitpid(pid, os.WNOHANG)


def _is_zombie(process: psutil.Process) -> bool:
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
