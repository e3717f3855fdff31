"""Status files: each model instance, a process, writes small files that the supervisor reads at any time.

They are in the supervisor's folder, named after the instance and its process:

- `.loading`: being loaded, since when, and the current step
- `.json`: ready; engine, precision and timings
- `.counters`, memory-mapped: batches begun and ended, when the last one began, and a heartbeat
- `.crash`: the signal that killed it while it was loading, written by Python's faulthandler
- `.fault`: it computed wrong outputs and serves no more; the difference in one line

`triton.snapshot` reads them.
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

# When the last batch began, batches begun, batches ended; written in this order, so that a reader that sees a batch as
# begun finds its time, not that of the batch before.
_BATCHES = struct.Struct("=dqq")
_ENDED, _ENDED_AT = struct.Struct("=q"), 16
_HEARTBEAT = struct.Struct("=d")
_PROGRESS = struct.Struct("=dqqd")
_BEAT_EVERY_S = 1.0
_MOST_CHARACTERS = 80  # of the current step
_lowering_log = logging.getLogger("graphkiln.lowering")


@dataclass(frozen=True, kw_only=True, slots=True)
class InstanceStatus:
    """Engine, precision and timings of a ready instance.

    Attributes:
        precision: Read back from the engine.
        nodes: Executed nodes by executor; empty where they could not be read.
        products: Executed convolutions and matrix products by element type.
        threads: Threads inside one operator.
        load_ms: Milliseconds from the start of loading until the instance was proven and ready.
        warmup_ms: The part of it for warming up.
        self_test: Verdict line of the golden samples, or empty.
        self_test_error: Relative L2 error on the golden samples, or -1.
        fallbacks: Number of the plan's session configurations that failed before the one that serves
            (`ProvenSession.failures`), not of those that were left to try.
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
    """Counters of an instance; times are CLOCK_MONOTONIC seconds, which all processes of a machine share.

    Attributes:
        begun: Batches begun.
        ended: Batches ended.
        begun_at: When the last batch began; 0 before the first one.
        heartbeat: Written once a second, whether the instance computes or not.
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
        """Read until two readings agree, so that a batch never has the time of the batch before.

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
        since: When loading began, in CLOCK_MONOTONIC seconds.
        activity: The current step, in words.
    """

    pid: int
    model: str
    version: int
    since: float
    activity: str = "lowering"


class BatchCounters:
    """Count batches and write a heartbeat in shared memory; a lock besides, because sessions are not thread-safe.

    Put `with counters:` around each batch; an exception ends the batch, too.
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
        """Mark the beginning of a batch."""
        self._lock.acquire()
        self._begun += 1
        _BATCHES.pack_into(self._memory, 0, time.monotonic(), self._begun, self._begun - 1)
        return self

    def __exit__(self, *_: object) -> None:
        """Mark the end of the batch."""
        _ENDED.pack_into(self._memory, _ENDED_AT, self._begun)
        self._lock.release()

    def close(self) -> None:
        """Stop the heartbeat and remove the file."""
        self._closing.set()
        self._thread.join()
        self._memory.close()
        self._path.unlink(missing_ok=True)

    def _beat(self) -> None:
        while not self._closing.wait(_BEAT_EVERY_S):
            _HEARTBEAT.pack_into(self._memory, _BATCHES.size, time.monotonic())


class StatusFile(Closeable):
    """Status of a ready instance, published until this is closed; `computing` counts its batches."""

    def __init__(self, folder: Path, instance: str, status: InstanceStatus) -> None:
        name = _name(instance, status.pid)
        self._fault = folder / f"{name}.fault"
        self.computing = BatchCounters(folder / f"{name}.counters")
        self._path = folder / f"{name}.json"
        write_whole(self._path, json.dumps(encode(status)).encode())  # last: its reader expects the counters

    @classmethod
    def publish(cls, instance: str, status: InstanceStatus) -> Self | None:
        """Publish in the supervisor's folder; None where no supervisor started this server."""
        folder = instances_folder()
        return cls(folder, instance, status) if folder else None

    def report_fault(self, line: str) -> None:
        """Report to the supervisor that this instance computes wrong outputs; `line` describes the difference."""
        write_whole(self._fault, " ".join(line.split()).encode())

    def close(self) -> None:
        """Remove the files."""
        self._path.unlink(missing_ok=True)
        self._fault.unlink(missing_ok=True)
        self.computing.close()


class LoadingFile(Closeable):
    """Record that an instance is being loaded, and its current step, until this is closed."""

    def __init__(self, folder: Path, instance: str, model: str, version: int) -> None:
        self._path = folder / f"{_name(instance, os.getpid())}.loading"
        self._loading = Loading(pid=os.getpid(), model=model, version=version, since=time.monotonic())
        self._write()
        self._events = _LoweringEvents(self._show)
        _lowering_log.addHandler(self._events)

    def close(self) -> None:
        """Remove the file: the instance is ready, or has failed."""
        _lowering_log.removeHandler(self._events)
        self._path.unlink(missing_ok=True)

    def _show(self, activity: str) -> None:
        self._loading = replace(self._loading, activity=activity)
        with suppress(OSError):  # only people read it
            self._write()

    def _write(self) -> None:
        write_whole(self._path, json.dumps(encode(self._loading)).encode())


class _LoweringEvents(logging.Handler):
    """Take the messages of lowering as the current step."""

    def __init__(self, show: Callable[[str], None]) -> None:
        super().__init__(logging.INFO)
        self._show = show

    def emit(self, record: logging.LogRecord) -> None:
        if record.levelno == logging.INFO:
            self._show(record.getMessage()[:_MOST_CHARACTERS])


def report_loading(instance: str, model: str, version: int) -> AbstractContextManager[object]:
    """Record that an instance is being loaded while the context lasts, if a supervisor started this server."""
    folder = instances_folder()
    return LoadingFile(folder, instance, model, version) if folder else nullcontext()


# A runtime may kill its process while it loads a version: by a bug, or because memory runs out. Triton only reports
# that the stub "is not healthy". Python's faulthandler writes the signal into the `.crash` file; after SIGKILL the file
# is empty. Source: CPython, "faulthandler": the first line names the signal.

SUFFIX = "crash"
_FATAL = re.compile(r"Fatal Python error: (.+)")
_SIGNALS = {  # by faulthandler's names
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
    """How a process ended while it loaded a version: description, and what to try."""

    what: str
    hint: str = ""

    def __str__(self) -> str:
        """The description, with the hint in parentheses."""
        return f"{self.what} ({self.hint})" if self.hint else self.what


class CrashRecord(Closeable):
    """Record in a file the signal that kills this process; the file is removed when this is closed."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = path.open("w")
        self._was_on = faulthandler.is_enabled()
        faulthandler.enable(self._file, all_threads=False)

    def close(self) -> None:
        """Stop recording."""
        faulthandler.disable()
        if self._was_on and sys.__stderr__ is not None:
            faulthandler.enable(sys.__stderr__)
        self._file.close()
        self._path.unlink(missing_ok=True)


def record_crash(instance: str) -> AbstractContextManager[object]:
    """Record what kills this process while the context lasts, if a supervisor started this server."""
    folder = instances_folder()
    return CrashRecord(folder / f"{instance}.{os.getpid()}.{SUFFIX}") if folder else nullcontext()


def note_end(folder: Path, pid: int, why: str) -> None:
    """Write into the crash records of a process why the supervisor ends it.

    Args:
        folder: Folder of the status files.
        pid: The process.
        why: Reason; follows "the process that loaded it was ended: ".

    Raises:
        OSError: A record cannot be written.
    """
    for path in folder.glob(f"*.{pid}.{SUFFIX}"):
        path.write_text(why, encoding="utf-8")


def describe_crash(loading: Loading, record: str) -> Crash:
    """Describe how a process ended that was loading a version.

    Args:
        loading: Its `.loading` file.
        record: Content of its `.crash` file.
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


def _name(instance: str, pid: int) -> str:
    """Name of an instance's files; with the pid, because an instance may end after its successor has begun."""
    return f"{instance}.{pid}"


def write_whole(path: Path, content: bytes) -> None:
    """Write a file and rename it into place, so that no reader sees half of it.

    Raises:
        OSError: It cannot be written.
    """
    temporary = path.with_name(f"{path.name}.tmp")
    temporary.write_bytes(content)
    temporary.rename(path)
