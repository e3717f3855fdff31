"""What one model instance tells the supervisor, in small files that are read at any time and without a message.

An instance is a process of its own. Its files in the supervisor's folder are named after it and its process:

- `.loading`: it is loading, since when
- `.json`: it is ready, and what it serves with
- `.counters`, memory-mapped: batches begun and ended, when the last one began, and a heartbeat
- `.crash`: what killed it while it was loading (`triton.load_crash`)
- `.fault`: it computed wrong outputs and serves no more; what differed, in one line
"""

from __future__ import annotations

import faulthandler
import json
import logging
import mmap
import os
import re
import struct
import sys
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Self

from graphkiln_backend.graph.decoding import encode
from graphkiln_backend.system.closing import Closeable
from graphkiln_backend.triton.environment import instances_folder

# How a process ended that was to load a version: Triton only says of it that it "is not healthy".
#
# A runtime may kill its process: by a bug (a wrong address, an assertion), or because memory runs out. Python's
# faulthandler writes the signal into a file beside the instance's others; the file of one that is ended from outside by
# SIGKILL stays empty. Source: CPython, "faulthandler": its first line names the signal.

SUFFIX = "crash"
_FATAL = re.compile(r"Fatal Python error: (.+)")
# By faulthandler's names.
_SIGNALS = {
    "Segmentation fault": "SIGSEGV",
    "Aborted": "SIGABRT",
    "Bus error": "SIGBUS",
    "Floating-point exception": "SIGFPE",
    "Floating point exception": "SIGFPE",
    "Illegal instruction": "SIGILL",
}
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


# When the last batch began, batches begun, batches ended. Written in this order: whoever sees that a batch has begun
# finds its time, not that of the one before.
_BATCHES = struct.Struct("=dqq")
_ENDED, _ENDED_AT = struct.Struct("=q"), 16
_HEARTBEAT = struct.Struct("=d")
_PROGRESS = struct.Struct("=dqqd")
_BEAT_EVERY_S = 1.0
_MOST_CHARACTERS = 80  # of what an instance says that it does
_lowering_log = logging.getLogger("graphkiln.lowering")


@dataclass(frozen=True, kw_only=True, slots=True)
class InstanceStatus:
    """What an instance serves with.

    Attributes:
        pid: Process of the instance.
        model: Model name.
        version: Model version.
        engine: Engine that runs the graph.
        device: Where it runs.
        precision: Precision that was read back from the engine.
        nodes: Number of executed nodes by executor; empty where they could not be read.
        products: Number of executed convolutions and matrix products by element type.
        threads: Threads inside one operator.
        load_ms: Milliseconds from the start of loading until the instance was proven and ready.
        warmup_ms: Milliseconds of it for warming up.
        self_test: Verdict line of the golden samples, or empty.
        self_test_error: Relative L2 error on the golden samples, or -1.
        fallbacks: How many session configurations of the plan failed before the one that serves.
        phases_ms: Milliseconds of each phase of loading.
    """

    pid: int
    model: str
    version: int
    engine: str
    device: str
    precision: str
    nodes: dict[str, int]
    products: dict[str, int]
    threads: int
    load_ms: float
    warmup_ms: float
    self_test: str
    self_test_error: float
    fallbacks: int
    phases_ms: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """How far an instance is; times are CLOCK_MONOTONIC seconds, which all processes of a machine share.

    Attributes:
        begun: Batches begun.
        ended: Batches ended.
        begun_at: When the last batch began; 0 before the first one.
        heartbeat: When the instance last showed that it runs: once a second, whether it computes or not.
    """

    begun: int
    ended: int
    begun_at: float
    heartbeat: float

    @property
    def computing(self) -> bool:
        """Whether a batch is in flight."""
        return self.begun != self.ended

    @classmethod
    def read(cls, path: Path) -> Self:
        """Reads counters until nothing changes meanwhile, so that a batch never has the time of the one before.

        Raises:
            OSError: The file is gone.
            struct.error: It was cut short.
        """
        with path.open("rb", buffering=0) as file:
            content = os.pread(file.fileno(), _PROGRESS.size, 0)
            while content[: _BATCHES.size] != (again := os.pread(file.fileno(), _PROGRESS.size, 0))[: _BATCHES.size]:
                content = again
        begun_at, begun, ended, heartbeat = _PROGRESS.unpack(again)
        return cls(begun=begun, ended=ended, begun_at=begun_at, heartbeat=heartbeat)


@dataclass(frozen=True, kw_only=True, slots=True)
class Loading:
    """An instance that is being loaded.

    Attributes:
        pid: Process of the instance.
        model: Model name.
        version: Model version.
        since: When loading began, in CLOCK_MONOTONIC seconds.
        activity: What it does, in words for people.
    """

    pid: int
    model: str
    version: int
    since: float
    activity: str = "lowering"


class BatchCounters:
    """Counts the batches that an instance has begun and ended, and beats, where the supervisor can read it.

    Put `with counters:` around each batch; an exception ends the batch, too. It is a lock besides, because sessions are
    not thread-safe: one batch at a time. Close it when the instance ends.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        write_whole(path, _PROGRESS.pack(0.0, 0, 0, time.monotonic()))
        with path.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), _PROGRESS.size)
        self._begun = 0
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="graphkiln-heartbeat", daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        """Marks the beginning of a batch."""
        self._lock.acquire()
        self._begun += 1
        _BATCHES.pack_into(self._memory, 0, time.monotonic(), self._begun, self._begun - 1)
        return self

    def __exit__(self, *_: object) -> None:
        """Marks the end of the batch."""
        _ENDED.pack_into(self._memory, _ENDED_AT, self._begun)
        self._lock.release()

    def close(self) -> None:
        """Stops beating and removes the file."""
        self._closing.set()
        self._thread.join()
        self._memory.close()
        self._path.unlink(missing_ok=True)

    def _beat(self) -> None:
        while not self._closing.wait(_BEAT_EVERY_S):
            _HEARTBEAT.pack_into(self._memory, _BATCHES.size, time.monotonic())


class StatusFile(Closeable):
    """A ready instance's side: publishes its status, and removes it when it is closed.

    Attributes:
        computing: The instance's counters.
    """

    def __init__(self, folder: Path, instance: str, status: InstanceStatus) -> None:
        name = _name(instance, status.pid)
        self._fault = folder / f"{name}.fault"
        self.computing = BatchCounters(folder / f"{name}.counters")
        self._path = folder / f"{name}.json"
        write_whole(self._path, json.dumps(encode(status)).encode())  # last: whoever sees it finds the counters

    @classmethod
    def publish(cls, instance: str, status: InstanceStatus) -> Self | None:
        """Publishes under the supervisor's folder; None when no supervisor started this server."""
        folder = instances_folder()
        return cls(folder, instance, status) if folder else None

    def report_fault(self, line: str) -> None:
        """Tells the supervisor that this instance computes wrong outputs.

        Args:
            line: What differed.
        """
        write_whole(self._fault, " ".join(line.split()).encode())

    def close(self) -> None:
        """Removes the files: the instance no longer serves."""
        self._path.unlink(missing_ok=True)
        self._fault.unlink(missing_ok=True)
        self.computing.close()


class LoadingFile(Closeable):
    """A loading instance's side: the file is there until it is closed."""

    def __init__(self, folder: Path, instance: str, model: str, version: int) -> None:
        self._path = folder / f"{_name(instance, os.getpid())}.loading"
        self._loading = Loading(pid=os.getpid(), model=model, version=version, since=time.monotonic())
        self._write()
        self._events = _LoweringEvents(self._show)
        _lowering_log.addHandler(self._events)

    def close(self) -> None:
        """Removes the file: the instance is ready, or will never be."""
        _lowering_log.removeHandler(self._events)
        self._path.unlink(missing_ok=True)

    def _show(self, activity: str) -> None:
        self._loading = replace(self._loading, activity=activity)
        with suppress(OSError):  # a person reads it: no reason not to load
            self._write()

    def _write(self) -> None:
        write_whole(self._path, json.dumps(encode(self._loading)).encode())


class _LoweringEvents(logging.Handler):
    """Tells what lowering logs: it knows what it does."""

    def __init__(self, tell: Callable[[str], None]) -> None:
        super().__init__(logging.INFO)
        self._tell = tell

    def emit(self, record: logging.LogRecord) -> None:
        if record.levelno == logging.INFO:
            self._tell(record.getMessage()[:_MOST_CHARACTERS])


def report_loading(instance: str, model: str, version: int) -> AbstractContextManager[object]:
    """Tells the supervisor, if there is one, that an instance is being loaded, as long as the context lasts."""
    folder = instances_folder()
    return LoadingFile(folder, instance, model, version) if folder else nullcontext()


def _name(instance: str, pid: int) -> str:
    """Of an instance's files: one that is being unloaded may end after its successor of the same name has begun."""
    return f"{instance}.{pid}"


def write_whole(path: Path, content: bytes) -> None:
    """Writes a file and renames it into place: nobody ever reads half of one.

    Raises:
        OSError: It cannot be written.
    """
    temporary = path.with_name(f"{path.name}.tmp")
    temporary.write_bytes(content)
    temporary.rename(path)
