"""A process that works for another one ends with it, also when that one is killed."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from multiprocessing import parent_process

_LIBC = ctypes.CDLL(None)
_PR_SET_PDEATHSIG = 1  # Source: prctl(2)


def end_with_parent() -> None:
    """Asks the kernel to kill this process when the thread that started it ends, or its whole process does."""
    if sys.platform == "linux":
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    parent = parent_process()
    if parent and os.getppid() != parent.pid:  # it ended before the line above
        os._exit(1)
