"""How a process ended that was to load a version: Triton only says of it that it "is not healthy".

A runtime may kill its process: by a bug (a wrong address, an assertion), or because memory runs out. Python's
faulthandler writes the signal into a file beside the instance's others; the file of one that is ended from outside by
SIGKILL stays empty. Source: CPython, "faulthandler": its first line names the signal.
"""

from __future__ import annotations

import faulthandler
import os
import re
import sys
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path

from graphkiln_backend.system.closing import Closeable
from graphkiln_backend.triton.environment import instances_folder
from graphkiln_backend.triton.instance_status import Loading

SUFFIX = "crash"
_FATAL = re.compile(r"Fatal Python error: (.+)")
_SIGNALS = {
    "Segmentation fault": "SIGSEGV",
    "Aborted": "SIGABRT",
    "Bus error": "SIGBUS",
    "Floating-point exception": "SIGFPE",
    "Floating point exception": "SIGFPE",
    "Illegal instruction": "SIGILL",
}
"""By faulthandler's names."""
_KILLED = "SIGKILL or by itself"
_TRY = {
    "SIGILL": "a package was built for another processor: graphkiln doctor examines this machine",
    _KILLED: "without memory the kernel does that: free some, or give the container more",
}
_TRY_OTHERWISE = (
    "it is a fault of the engine, not of the configuration: try another engine (engine: openvino) or precision, "
    "fewer rewrites (optimization { graph { level: 2 } }), or another release of the runtime"
)


@dataclass(frozen=True, slots=True)
class Crash:
    """How a process ended.

    Attributes:
        what: What happened.
        hint: What to try.
    """

    what: str
    hint: str = ""

    def __str__(self) -> str:
        """Both."""
        return f"{self.what} ({self.hint})" if self.hint else self.what


class CrashRecord(Closeable):
    """Records what kills this process, until it is closed.

    Args:
        path: The record; removed when it is closed.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = path.open("w")
        self._was_on = faulthandler.is_enabled()
        faulthandler.enable(self._file, all_threads=False)

    def close(self) -> None:
        """Stops recording."""
        faulthandler.disable()
        if self._was_on and sys.__stderr__ is not None:
            faulthandler.enable(sys.__stderr__)
        self._file.close()
        self._path.unlink(missing_ok=True)


def record_crash(instance: str) -> AbstractContextManager[object]:
    """Records what kills this process, if there is a supervisor to read it, as long as the context lasts.

    Args:
        instance: Name of the instance.
    """
    folder = instances_folder()
    return CrashRecord(folder / f"{instance}.{os.getpid()}.{SUFFIX}") if folder else nullcontext()


def note_end(folder: Path, pid: int, why: str) -> None:
    """Says in the records of a process why it is ended on purpose.

    Args:
        folder: Of the instances' files.
        pid: The process.
        why: What follows "the process that loaded it was ended: ".

    Raises:
        OSError: A record cannot be written.
    """
    for path in folder.glob(f"*.{pid}.{SUFFIX}"):
        path.write_text(why, encoding="utf-8")


def describe_crash(loading: Loading, record: str) -> Crash:
    """How a process ended that was to load a version.

    Args:
        loading: What it said of itself.
        record: What its record says.
    """
    fatal = _FATAL.search(record)
    if record and not fatal:
        return Crash(f"the process that loaded it was ended: {record}")
    name = fatal[1].strip() if fatal else ""
    signal = _SIGNALS.get(name, name) or _KILLED
    return Crash(
        f"the process that loaded it was killed by {signal} while it did this: {loading.activity}",
        _TRY.get(signal, _TRY_OTHERWISE),
    )
