"""Start and stop child processes without leaving any behind.

Programs are started in their own session, so that Ctrl-C reaches only this process, which then stops them in order.
Three safeguards end children if this process dies: the kernel's parent-death signal (`start(at_our_end=...)`,
`end_with_parent`), daemon processes of multiprocessing (`worker`), and a guard for a process group (`Guard`).
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

_PR_SET_PDEATHSIG = 1  # Source: prctl(2)
_SAFE_PATH = "PYTHONSAFEPATH"
_ABANDONED_S = 10.0


def start(
    command: Sequence[str | Path],
    *,
    log: int | IO[Any] | None = None,
    at_our_end: signal.Signals | None = None,
    **options: Any,
) -> subprocess.Popen[bytes]:
    """Start a program as the leader of its own session and process group, with stdin closed.

    Args:
        command: The program and its arguments.
        log: Destination of stdout and stderr; None to inherit them.
        at_our_end: Signal that the kernel sends to the program when the thread that started it ends (prctl(2),
            PR_SET_PDEATHSIG; setpriv(1)). Ignored if util-linux is not installed.
        **options: Further options of `subprocess.Popen`.
    """
    if at_our_end and shutil.which("setpriv"):
        command = ["setpriv", "--pdeathsig", at_our_end.name.removeprefix("SIG"), *command]
    outputs = {} if log is None else {"stdout": log, "stderr": log}
    defaults = {"stdin": subprocess.DEVNULL, "start_new_session": True, **outputs}
    return subprocess.Popen(command, **{**defaults, **options})


def stop(process: subprocess.Popen[bytes], grace_s: float) -> int:
    """Send SIGTERM to a program, and SIGKILL to its process group if it does not end in time.

    Args:
        process: A process returned by `start`.
        grace_s: Seconds between the two signals.

    Returns:
        The exit code, or minus the number of the signal that ended it.
    """
    process.terminate()
    try:
        return process.wait(grace_s)
    except subprocess.TimeoutExpired:
        kill_group(process)
        return process.returncode


def kill_group(process: subprocess.Popen[bytes]) -> None:
    """Kill a process group by its leader, and wait for the leader."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def is_gone(pid: int) -> bool:
    """Check that a process has ended; zombies count as ended."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def process_age_s(pid: int) -> float:
    """Seconds since the start of a process, independent of the system clock. Source: proc(5), `starttime`.

    Raises:
        OSError: There is no such process.
    """
    ticks = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")


def end_with_parent() -> None:
    """Have the kernel kill this process when the thread that started it ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    started = sys.modules.get("multiprocessing.process")  # imported only in children of multiprocessing
    parent = started.parent_process() if started else None
    if parent and os.getppid() != parent.pid:  # the parent ended before the call above
        os._exit(1)


class Guard(Closeable):
    """A shell process that kills a process group when this process is gone, even after SIGKILL.

    tritonserver asks the kernel for SIGKILL at its parent's death, but its stubs check their parent only while they
    run. The guard reads from a pipe whose write end only this process holds.

    Args:
        server: The leader of the group.
    """

    def __init__(self, server: subprocess.Popen[bytes]) -> None:
        script = 'read -r _; kill -s KILL -- "-$1"'
        self._process = start(
            ["/bin/sh", "-c", script, "graphkiln-guard", str(server.pid)],
            log=subprocess.DEVNULL,
            stdin=subprocess.PIPE,
        )

    def close(self) -> None:
        """Stop guarding; the guard is killed before the pipe closes, so that it does nothing."""
        self._process.kill()
        self._process.wait()
        if self._process.stdin:
            self._process.stdin.close()


class Reaper:
    """Reap orphans that PID 1 of a container inherits.

    A zombie older than `_ABANDONED_S` was not started by this program, which waits for its own children.
    """

    def __init__(self) -> None:
        self._since: dict[int, float] = {}

    def reap(self) -> None:
        """Reap abandoned zombies; call about once a second."""
        if os.getpid() != 1:
            return
        now = time.monotonic()
        zombies = {child.pid for child in psutil.Process().children() if is_gone(child.pid)}
        self._since = {pid: self._since.get(pid, now) for pid in zombies}
        for pid, since in self._since.items():
            if now - since > _ABANDONED_S:
                with suppress(ChildProcessError):
                    os.waitpid(pid, os.WNOHANG)


@contextmanager
def worker(work: Callable[..., None], *arguments: object) -> Iterator[tuple[Connection, BaseProcess]]:
    """Run `work(sender, *arguments)` in a spawned process, which is killed at the end of the block.

    Args:
        work: Function at the top level of a module; sends its outcome through `sender`.
        *arguments: Picklable arguments.

    Yields:
        The receiving connection, which raises EOFError once the process has ended, and the process.
    """
    from multiprocessing import get_context  # 10 ms that the start of a server should not pay

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
        if process.pid is not None:
            process.kill()
            process.join()


def _begin(work: Callable[..., None], sender: Connection, arguments: tuple[object, ...]) -> None:
    end_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C and ends this process
    work(sender, *arguments)


@contextmanager
def safe_path() -> Iterator[None]:
    """Keep Python processes started in the block from importing modules of the working folder, such as `queue.py`.

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
    """Make Python and libraries that read `TMPDIR` create temporary files in a folder."""
    tempfile.tempdir = os.environ["TMPDIR"] = folder
