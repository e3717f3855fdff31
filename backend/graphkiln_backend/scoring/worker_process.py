"""A worker's process as its node sees it: started, watched, ended, and how it ended told.

The process is watched from beside it: it hangs when nothing in it has gone on for as long as its attempts allow, and it
eats memory when it has more than its share of a node whose memory is nearly gone. Either way it is killed; a stopped
process (SIGSTOP) is, too. A process that has less than its share is never killed for what others take.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from queue import Empty, Queue

import psutil

from graphkiln_backend.scoring.outcomes import Attempt, Blame, Ended, Outcome, Progress, Ready
from graphkiln_backend.scoring.request import ScoreRequest
from graphkiln_backend.scoring.scratch import Scratch, remove_dead_scratch, scratch_folder
from graphkiln_backend.scoring.worker_main import Assignment
from graphkiln_backend.system.closing import Closeable
from graphkiln_backend.system.resources import CGROUPS, OWN_CGROUPS, memory_groups

# Memory of a node and of a process, as the kernel counts it.


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeMemory:
    """Of a machine, or of a container, service or job that this process runs in.

    Attributes:
        used_bytes: What cannot be had without taking it from a process.
        total_bytes: What there is.
    """

    used_bytes: int
    total_bytes: int

    @property
    def share_used(self) -> float:
        """From 0 to 1."""
        return self.used_bytes / self.total_bytes


def node_memory(cgroups: Path = CGROUPS, own: Path = OWN_CGROUPS) -> NodeMemory:
    """Of the fullest container, service or job around this process, where one is limited; else of the machine.

    Args:
        cgroups: Where control groups are mounted.
        own: The kernel's file that names those of this process.
    """
    machine = psutil.virtual_memory()
    groups = [
        NodeMemory(used_bytes=group.used_bytes, total_bytes=group.limit_bytes)
        for group in memory_groups(cgroups, own)
        if group.limit_bytes < machine.total
    ]
    whole = NodeMemory(used_bytes=machine.total - machine.available, total_bytes=machine.total)
    return max(groups, key=lambda each: each.share_used, default=whole)


def process_memory(pid: int) -> int:
    """Bytes of a process, its part of what it shares with others (PSS); 0 when it is gone.

    Args:
        pid: The process. Source: proc(5), `smaps_rollup`.
    """
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:")), 0)


START_S = 1800.0  # A worker that is not ready by then hangs: compiling a model for a device takes minutes
# Of a node's memory in use: before the kernel, or Ray at 0.95, ends a process that has nothing to do with it.
NEARLY_GONE = 0.9
_MAIN = "graphkiln_backend.scoring.worker_main"
_LOOK_S = 0.25
_TOLD = 400  # characters of a process's last words


class WorkerProcess(Closeable):
    """A worker in a process of its own.

    Args:
        name: Of the worker.
        request: The run; its `cores_per_worker` is what this one has.
        memory_bytes: Its share of the node's memory.
    """

    def __init__(self, name: str, request: ScoreRequest, memory_bytes: float) -> None:
        self._name, self._memory_bytes = name, memory_bytes
        self._outcomes: Queue[Outcome] = Queue()
        self._running: dict[int, Attempt] = {}
        self._sending = threading.Lock()  # a large message is several writes, and two may be assigned at a time
        self._reason = ""
        self._ready = False
        self._progress = Progress.create()
        remove_dead_scratch()
        self._folder = scratch_folder(Scratch.WORKER)
        self._words = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the process
        self._keeper = ThreadPoolExecutor(2, thread_name_prefix=f"keeper of {name}")
        self._connection, self._process = self._keeper.submit(self._start).result()
        self._connection.send(request)
        for task in (self._receive, self._watch):
            self._keeper.submit(task)

    @property
    def pid(self) -> int:
        """Of the process."""
        return self._process.pid

    def assign(self, number: int, attempt: Attempt) -> None:
        """Sends an attempt; where the process is gone, `poll` tells.

        Args:
            number: Of the attempt.
            attempt: The attempt.
        """
        self._running[number] = attempt
        with self._sending, suppress(OSError):
            self._connection.send(Assignment(number=number, attempt=attempt))

    def poll(self, timeout_s: float) -> list[Outcome]:
        """What has happened since; waits for something, at most some time. The last outcome is an `Ended`."""
        try:
            found = [self._outcomes.get(timeout=timeout_s)]
        except Empty:
            return []
        while not self._outcomes.empty():
            found.append(self._outcomes.get())
        return found

    def close(self) -> None:
        """Kills the process, if it still lives, and waits for it."""
        self._process.kill()
        self._keeper.shutdown()
        self._connection.close()
        self._words.close()
        self._folder.close()
        self._progress.close()

    def _start(self) -> tuple[Connection, subprocess.Popen[bytes]]:
        """On the keeper's thread: the process dies with the thread that started it (`worker_main`)."""
        ours, theirs = socket.socketpair()
        with theirs:
            descriptors = (theirs.fileno(), self._progress.descriptor)
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", _MAIN, self._name, *map(str, descriptors)],
                pass_fds=descriptors,
                stdin=subprocess.DEVNULL,
                stdout=self._words,
                stderr=self._words,
                env=os.environ | self._environment(),
            )
        return Connection(ours.detach()), process

    def _environment(self) -> dict[str, str]:
        return {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "TMPDIR": str(self._folder.path)}

    def _receive(self) -> None:
        """Passes on what the process tells, until it ends."""
        try:
            while True:
                outcome = self._connection.recv()
                if isinstance(outcome, Ended):
                    self._outcomes.put(outcome)
                    break
                self._note(outcome)
                self._outcomes.put(outcome)
        except (EOFError, OSError):
            self._outcomes.put(self._explain_end(self._process.wait()))
        finally:
            self._process.kill()
            self._process.wait()

    def _note(self, outcome: Outcome) -> None:
        if isinstance(outcome, Ready):
            self._ready = True
        else:
            self._running.pop(outcome.attempt, None)  # type: ignore[union-attr]  # an Ended does not come here

    def _explain_end(self, status: int) -> Ended:
        reason = self._reason or _name_status(status)
        if not self._ready:
            reason = f"it {reason} while it started: {self._last_words()}"
        return Ended(
            worker=self._name,
            blame=Blame.ROWS if self._ready else Blame.WORKER,
            reason=reason,
            reached=self._progress.reached,
            committing=self._progress.committing,
        )

    def _last_words(self) -> str:
        size = self._words.seek(0, os.SEEK_END)
        self._words.seek(max(0, size - _TOLD))
        return self._words.read().decode(errors="replace").strip()

    def _watch(self) -> None:
        """Ends the process when it hangs or eats the node's memory."""
        counter, since = self._progress.counter, time.monotonic()
        while self._process.poll() is None:
            now = time.monotonic()
            if self._progress.counter != counter or (self._ready and not self._running):
                counter, since = self._progress.counter, now
            if reason := self._hangs(now - since) or self._eats():
                self._reason = reason
                self._process.kill()
            time.sleep(_LOOK_S)

    def _hangs(self, silent_s: float) -> str:
        patience_s = min((each.patience_s for each in [*self._running.values()]), default=START_S)
        return f"hung for {silent_s:.0f} s" if silent_s > patience_s else ""

    def _eats(self) -> str:
        node = node_memory()
        if node.share_used < NEARLY_GONE:
            return ""
        mine = process_memory(self.pid)
        if mine <= self._memory_bytes:
            return ""
        return f"took {_gib(mine)} of memory, more than its share of {_gib(self._memory_bytes)}"


def _gib(size_bytes: float) -> str:
    return f"{size_bytes / 2**30:.1f} GiB"


def _name_status(status: int) -> str:
    """How a process ended, as a reason."""
    if status >= 0:
        return f"ended its worker with exit status {status}"
    name = signal.Signals(-status).name
    likely = ", as the kernel does when memory is gone" if -status == signal.SIGKILL else ""
    return f"ended its worker with {name}{likely}"
