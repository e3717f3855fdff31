"""A process that works for another one ends with it, also when that one is killed."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from multiprocessing.connection import Connection
    from multiprocessing.process import BaseProcess

_LIBC = ctypes.CDLL(None)
_PR_SET_PDEATHSIG = 1  # Source: prctl(2)
_SAFE_PATH = "PYTHONSAFEPATH"


def end_with_parent() -> None:
    """Asks the kernel to kill this process when the thread that started it ends, or its whole process does."""
    if sys.platform == "linux":
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    started = sys.modules.get("multiprocessing.process")  # which only a process of that library's has imported
    parent = started.parent_process() if started else None
    if parent and os.getppid() != parent.pid:  # it ended before the line above
        os._exit(1)


@contextmanager
def safe_path() -> Iterator[None]:
    """Processes that are started meanwhile import nothing from the working folder: a `queue.py` there is not Python's.

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


@contextmanager
def worker(work: Callable[..., None], *arguments: object) -> Iterator[tuple[Connection, BaseProcess]]:
    """Runs `work(sender, *arguments)` in a process of its own, which ends with the block, however that ends.

    Args:
        work: A function of a module; sends what comes of it. Errors with fields of their own cannot be pickled.
        *arguments: What can be pickled.

    Yields:
        Where what it sends arrives (EOFError when it has ended), and the process.
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


def keep_temporary_files_in(folder: str) -> None:
    """Lets this process and its libraries, which look for the variable, make temporary files in a folder."""
    tempfile.tempdir = os.environ["TMPDIR"] = folder
