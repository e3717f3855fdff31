"""The processes of instances, whether they have got as far as writing their own files or not."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from graphkiln_backend.graph.modules import LazyModule
from graphkiln_backend.server.run_folder import BACKEND_NAMES

if TYPE_CHECKING:
    import psutil
else:
    psutil = LazyModule("psutil")

_PROGRAM = "triton_python_backend_stub"


@dataclass(frozen=True, kw_only=True, slots=True)
class Stub:
    """A process in which Triton runs graphkiln's backend.

    Attributes:
        pid: The process.
        model: Model name.
        version: Model version.
        age_s: Seconds since it was started.
        ended: Whether it has ended, and tritonserver has not asked how; nothing else is known of it then, nor whether
            it was one of ours.
    """

    pid: int
    model: str
    version: str
    age_s: float
    ended: bool = False


def read_stubs(server: int) -> list[Stub]:
    """The stubs below a tritonserver, and its own children that have ended, whatever they were.

    Those of the user's own Python backends that run are not ours to judge.
    """
    try:
        descendants = psutil.Process(server).children(recursive=True)
    except psutil.NoSuchProcess:
        return []
    found = (_read(process, server) for process in descendants)
    return [stub for stub in found if stub]


def _read(process: psutil.Process, server: int) -> Stub | None:
    """Of `.../triton_python_backend_stub .../MODEL/VERSION/model.py ... .../BACKEND`, as Triton starts it."""
    try:
        age_s = process_age_s(process.pid)
        if process.status() == psutil.STATUS_ZOMBIE:
            is_own = process.ppid() == server
            return Stub(pid=process.pid, model="", version="", age_s=age_s, ended=True) if is_own else None
        folder = _model_folder(process.cmdline())
    except (psutil.Error, OSError):  # it has just ended
        return None
    if folder is None:
        return None
    return Stub(pid=process.pid, model=folder.parent.name, version=folder.name, age_s=age_s)


def process_age_s(pid: int) -> float:
    """Seconds since a process was started, whatever has become of the clock. Source: proc(5), `starttime`.

    Raises:
        OSError: There is no such process.
    """
    ticks = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")


def _model_folder(words: Sequence[str]) -> Path | None:
    names = [Path(word).name for word in words]
    if _PROGRAM not in names[:-2] or names[-1] not in BACKEND_NAMES:
        return None
    return Path(words[names.index(_PROGRAM) + 1]).parent
