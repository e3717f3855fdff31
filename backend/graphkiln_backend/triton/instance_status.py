"""Status files: small files that each model instance, a process, writes for the supervisor.

They are in the supervisor's folder, named after the instance and its process:

- `.loading`: the instance is being loaded: since when, and the current step
- `.json`, written at the end of loading: engine, precision and timings
- `.counters`, memory-mapped: batches begun and ended, when the last one began, and a heartbeat
- `.crash`: the signal that killed the process during loading, written by Python's faulthandler
- `.fault`: the instance computed wrong outputs and refuses requests; the difference in one line
- `.metrics`: its metrics in Prometheus' text format (`triton.metrics`)

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
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Self

from graphkiln_backend.graph.decoding import encode
from graphkiln_backend.system.closing import Closeable
from graphkiln_backend.system.files import write_whole
from graphkiln_backend.triton.environment import instances_folder

# When the last batch began, batches begun, batches ended. Written in this order, so that a reader that sees a batch as
# begun also sees its time, not that of the batch before.
_BATCHES = struct.Struct("=dqq")
_ENDED, _ENDED_AT = struct.Struct("=q"), 16
_HEARTBEAT = struct.Struct("=d")
_PROGRESS = struct.Struct("=dqqd")
_BEAT_EVERY_S = 1.0
_MOST_CHARACTERS = 80  # of the current step

# faulthandler's names of signals, in the first line of its report. Source: CPython, "faulthandler".
_FATAL = re.compile(r"Fatal Python error: (.+)")
_SIGNALS = {
    "Segmentation fault": "SIGSEGV",
    "Aborted": "SIGABRT",
    "Bus error": "SIGBUS",
    "Floating-point exception": "SIGFPE",
    "Floating point exception": "SIGFPE",
    "Illegal instruction": "SIGILL",
}
_KILLED = "SIGKILL or by itself"  # faulthandler cannot report SIGKILL: the record stays empty
_HINTS = {
    "SIGILL": "a package was built for another processor: graphkiln doctor examines this machine",
    _KILLED: "the kernel does that when memory runs out: free some, or raise the container's limit",
}
_OTHER_HINT = (
    "this is a fault of the engine, not of the configuration: try another engine (engine: openvino) or precision, "
    "fewer rewrites (optimization { graph { level: 2 } }), or another release of the runtime"
)

_lowering_log = logging.getLogger("graphkiln.lowering")


@dataclass(frozen=True, kw_only=True, slots=True)
class InstanceStatus:
    """Engine, precision and timings of a ready instance.

    Attributes:
        precision: Read back from the engine.
        nodes: Executed nodes by execution provider or device; empty if the engine does not report them.
        products: Executed convolutions and matrix products by element type.
        threads: Threads inside one operator.
        load_ms: Milliseconds from `initialize` until the instance was proven and ready.
        warmup_ms: The part of `load_ms` that warm-up took.
        self_test: Verdict line of the golden samples, or empty.
        self_test_error: Relative L2 error on the golden samples, or -1.
        fallbacks: Session configurations that failed before the one that serves (`ProvenSession.failures`).
        phases_ms: Milliseconds of each phase of loading, and of the start of the process (`stub start`).
        backend: Triton's name of the backend.
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
    backend: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """Counters of an instance; times are CLOCK_MONOTONIC seconds, which all processes of a machine share.

    Attributes:
        begun: Batches begun.
        ended: Batches ended.
        begun_at: When the last batch began; 0 before the first one.
        heartbeat: Time of the last heartbeat, written once a second also while the instance computes.
    """

    begun: int
    ended: int
    begun_at: float
    heartbeat: float

    @property
    def computing(self) -> bool:
        """True while a batch is in flight."""
        return self.begun != self.ended

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read until two readings agree, so that a batch never has the time of the batch before.

        Raises:
            OSError: The file does not exist any more.
            struct.error: The file is truncated.
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


@contextmanager
def report_loading(instance: str, model: str, version: int) -> Iterator[None]:
    """Publish in the block that an instance is being loaded, and record the signal that kills this process.

    Does nothing if no supervisor started this server.
    """
    folder = instances_folder()
    if folder is None:
        yield
        return
    # A runtime may kill its process by a bug or by running out of memory; Triton only reports an unhealthy stub.
    with (
        CrashRecord(status_path(folder, instance, os.getpid(), "crash")),
        LoadingFile(folder, instance, model, version),
    ):
        yield


class LoadingFile(logging.Handler, Closeable):
    """Publish that an instance is being loaded; the current step is the last INFO message of lowering."""

    def __init__(self, folder: Path, instance: str, model: str, version: int) -> None:
        super().__init__(logging.INFO)
        self._path = status_path(folder, instance, os.getpid(), "loading")
        self._loading = Loading(pid=os.getpid(), model=model, version=version, since=time.monotonic())
        self._write()
        _lowering_log.addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        """Publish a message as the current step."""
        if record.levelno == logging.INFO:
            self._loading = replace(self._loading, activity=record.getMessage()[:_MOST_CHARACTERS])
            with suppress(OSError):  # the step is informative only
                self._write()

    def close(self) -> None:
        """Remove the file: the instance is ready, or has failed."""
        _lowering_log.removeHandler(self)
        super().close()
        self._path.unlink(missing_ok=True)

    def _write(self) -> None:
        write_whole(self._path, json.dumps(encode(self._loading)).encode())


class CrashRecord(Closeable):
    """Record in a file the signal that kills this process; `close` removes the file."""

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


def note_end(folder: Path, pid: int, why: str) -> None:
    """Write into the crash records of a process why the supervisor ends it.

    Args:
        folder: Folder of the status files.
        pid: The process.
        why: Reason; follows "the process that loaded it was ended: ".

    Raises:
        OSError: A record cannot be written.
    """
    for path in folder.glob(f"*.{pid}.crash"):
        path.write_text(why, encoding="utf-8")


@dataclass(frozen=True, slots=True)
class Crash:
    """The end of a process that was loading a version: description, and a hint."""

    what: str
    hint: str = ""

    def __str__(self) -> str:
        """The description, with the hint in parentheses."""
        return f"{self.what} ({self.hint})" if self.hint else self.what


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
    what = f"the process that loaded it was killed by {signal} while it did this: {loading.activity}"
    return Crash(what, _HINTS.get(signal, _OTHER_HINT))


class StatusFile(Closeable):
    """Status of a ready instance, published until closed; `computing` counts its batches."""

    def __init__(self, folder: Path, instance: str, status: InstanceStatus) -> None:
        self._fault = status_path(folder, instance, status.pid, "fault")
        self.computing = BatchCounters(status_path(folder, instance, status.pid, "counters"))
        self._path = status_path(folder, instance, status.pid, "json")
        write_whole(self._path, json.dumps(encode(status)).encode())  # last: readers expect the counters to exist

    @classmethod
    def publish(cls, instance: str, status: InstanceStatus) -> Self | None:
        """Publish in the supervisor's folder; None if no supervisor started this server."""
        folder = instances_folder()
        return cls(folder, instance, status) if folder else None

    def report_fault(self, line: str) -> None:
        """Report that this instance computes wrong outputs; `line` describes the difference."""
        write_whole(self._fault, " ".join(line.split()).encode())

    def close(self) -> None:
        """Remove the files."""
        self._path.unlink(missing_ok=True)
        self._fault.unlink(missing_ok=True)
        self.computing.close()


class BatchCounters:
    """Count batches and write a heartbeat in shared memory.

    Put `with counters:` around each batch. The block also holds a lock, because sessions are not thread-safe.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        write_whole(path, _PROGRESS.pack(0.0, 0, 0, time.monotonic()))
        with path.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), _PROGRESS.size)
        self._begun = 0
        self._lock = threading.Lock()
        self.on_beat: Callable[[], None] | None = None  # called once a second, in the thread of the heartbeat
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
        """Mark the end of the batch, also after an exception."""
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
            if self.on_beat:
                self.on_beat()


def status_path(folder: Path, instance: str, pid: int, kind: str) -> Path:
    """Path of an instance's file; with the pid, because an instance may end after its successor has begun."""
    return folder / f"{instance}.{pid}.{kind}"
