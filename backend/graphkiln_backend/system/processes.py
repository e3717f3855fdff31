"""Child processes: started, ended, never left behind.

A program is started in its own session, so that Ctrl-C reaches this process alone, which then ends the other in order.
What must not outlive this process, however that ends, has one of three safeguards: the kernel's signal at a parent's
death, a pipe that this process holds open, or a guard beside a whole process group.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from graphkiln_backend.graph.modules import LazyModule
from graphkiln_backend.system.closing import Closeable

if TYPE_CHECKING:
    import subprocess
    from multiprocessing.connection import Connection
    from multiprocessing.process import BaseProcess

    import psutil
else:
    psutil = LazyModule("psutil")
    subprocess = LazyModule("subprocess")

_LIBC = ctypes.CDLL(None)
_PR_SET_PDEATHSIG = 1  # Source: prctl(2)
_SAFE_PATH = "PYTHONSAFEPATH"
_ABANDONED_S = 10.0
_WATCH_PIPE = 'read -r _; kill -s KILL -- "-$1"'


def start(
    command: Sequence[str | Path],
    *,
    log: int | IO[Any] | None = None,
    at_our_end: signal.Signals | None = None,
    **options: Any,
) -> subprocess.Popen[bytes]:
    """Start a program as the leader of its own session and process group, without standard input.

    Args:
        command: The program and its arguments.
        log: Takes both of its outputs; they are this process's without it.
        at_our_end: What the kernel sends it when the thread that started it ends; ignored without util-linux.
        **options: Of `subprocess.Popen`, such as `env` and `cwd`.
    """
    prefix = ending_with_us(at_our_end) if at_our_end else ()
    outputs = {} if log is None else {"stdout": log, "stderr": log}
    defaults = {"stdin": subprocess.DEVNULL, "start_new_session": True, **outputs}
    return subprocess.Popen([*prefix, *command], **{**defaults, **options})


def ending_with_us(number: signal.Signals) -> tuple[str, ...]:
    """Prefix of a command that gets a signal when the thread that started it ends; empty without util-linux.

    Source: prctl(2), PR_SET_PDEATHSIG; setpriv(1).
    """
    return ("setpriv", "--pdeathsig", number.name.removeprefix("SIG")) if shutil.which("setpriv") else ()


def stop(process: subprocess.Popen[bytes], grace_s: float) -> int:
    """End a program as a service manager does: with SIGTERM, then its whole group with SIGKILL.

    Args:
        process: From `start`.
        grace_s: Seconds that it has after SIGTERM.

    Returns:
        Its exit code, or minus the signal that ended it.
    """
    process.terminate()
    try:
        return process.wait(grace_s)
    except subprocess.TimeoutExpired:
        kill_group(process)
        return process.returncode


def kill_group(process: subprocess.Popen[bytes]) -> None:
    """Kill the leader of a process group and its group, whatever state they are in."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def is_gone(pid: int) -> bool:
    """True if a process has ended, also where its parent has not asked how."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def end_with_parent() -> None:
    """Have the kernel kill this process when the thread that started it ends, or its whole process does."""
    if sys.platform == "linux":
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    started = sys.modules.get("multiprocessing.process")  # imported only in a process that this library has started
    parent = started.parent_process() if started else None
    if parent and os.getppid() != parent.pid:  # it ended before the line above
        os._exit(1)


class Guard(Closeable):
    """A process that kills a process group when this process is gone, however that came.

    tritonserver asks the kernel for SIGKILL at its parent's death; its stubs look after their parent only while they
    run. The guard waits at a pipe whose other end is held by this process alone.

    Args:
        server: The leader of the group.
    """

    def __init__(self, server: subprocess.Popen[bytes]) -> None:
        self._process = start(
            ["/bin/sh", "-c", _WATCH_PIPE, "graphkiln-guard", str(server.pid)],
            log=subprocess.DEVNULL,
            stdin=subprocess.PIPE,
        )

    def close(self) -> None:
        """End the guard first, so that it does nothing."""
        self._process.kill()
        self._process.wait()
        if self._process.stdin:
            self._process.stdin.close()


class Reaper:
    """Take the exit status of inherited children: PID 1 of a container inherits every orphan.

    A zombie for which no code has waited in `_ABANDONED_S` was not started by this program.
    """

    def __init__(self) -> None:
        self._since: dict[int, float] = {}

    def reap(self) -> None:
        """Call about once a second."""
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
    with suppress(psutil.NoSuchProcess):
        return process.status() == psutil.STATUS_ZOMBIE
    return False


# Python functions in a process by multiprocessing.


@contextmanager
def worker(work: Callable[..., None], *arguments: object) -> Iterator[tuple[Connection, BaseProcess]]:
    """Run `work(sender, *arguments)` in another process, which ends with the block, however that ends.

    Args:
        work: A function of a module; sends its outcome. Errors with further fields cannot be pickled.
        *arguments: Picklable.

    Yields:
        The connection that receives what it sends (EOFError when it has ended), and the process.
    """
    from multiprocessing import get_context  # 10 ms, which the start of a server need not pay

    context = get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_begin, args=(work, sender, arguments), daemon=True)
    try:
        with safe_path():
            process.start()
        sender.close()
        yield receiver, process
    finally:
        sender.close()
        receiver.close()
        if process.pid is not None:  # it was started
            process.kill()
            process.join()


def _begin(work: Callable[..., None], sender: Connection, arguments: tuple[object, ...]) -> None:
    end_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the parent, which ends this process
    work(sender, *arguments)


@contextmanager
def safe_path() -> Iterator[None]:
    """Keep processes that are started in the block from importing from the working folder, such as its `queue.py`.

    Source: Python's manual, `PYTHONSAFEPATH`.
    """
    before = os.environ.get(_SAFE_PATH)
    os.environ[_SAFE_PATH] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_SAFE_PATH]
        else:
            os.environ[_SAFE_PATH] = before


def keep_temporary_files_in(folder: str) -> None:
    """Make this process and its libraries, which read `TMPDIR`, create temporary files in a folder."""
    tempfile.tempdir = os.environ["TMPDIR"] = folder
