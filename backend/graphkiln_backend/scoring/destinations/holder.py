"""Which process holds a claim, told so that others can see whether it still lives."""

from __future__ import annotations

import hashlib
import os
import socket
from dataclasses import dataclass
from pathlib import Path

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True, kw_only=True, slots=True)
class Holder:
    """A process.

    Attributes:
        run_id: What its run is called.
        host: Name of its machine, for people.
        machine: Where its number means what it says: the boot of a kernel and a namespace of processes.
        pid: Its number.
        started: When it started, in ticks since the boot: numbers are used again.
    """

    run_id: str
    host: str
    machine: str
    pid: int
    started: int

    @classmethod
    def of_this_process(cls, run_id: str) -> Holder:
        """This one."""
        pid = os.getpid()
        started = _started(pid) or 0
        return cls(run_id=run_id, host=socket.gethostname(), machine=_machine(), pid=pid, started=started)

    def __str__(self) -> str:
        return f"run {self.run_id} (process {self.pid} on {self.host})"


def is_gone(holder: Holder) -> bool:
    """Whether a process is seen to have ended; False where this process could not see it."""
    return holder.machine == _machine() and _started(holder.pid) != holder.started


def _machine() -> str:
    return f"{_BOOT_ID.read_text().strip()} {Path('/proc/self/ns/pid').readlink()}"


def _started(pid: int) -> int | None:
    """Ticks between the boot and a process's start; None where there is none. Source: proc(5), `starttime`."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] in {"Z", "X"} else int(fields[19])


def writer_token() -> str:
    """What a file that this process writes carries in its name, for `is_dead_writer`."""
    pid = os.getpid()
    return f"{_machine_digest()}-{pid}-{_started(pid) or 0}"


def is_dead_writer(token: str) -> bool:
    """Whether the process that carries a token is seen to have ended; False where this process could not see it."""
    machine, pid, started = token.split("-")
    return machine == _machine_digest() and _started(int(pid)) != int(started)


def _machine_digest() -> str:
    return hashlib.sha256(_machine().encode()).hexdigest()[:12]
