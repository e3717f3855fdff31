"""Log of a service and its child processes: JSON lines on standard error, and removal of noise.

For JSON, standard output and standard error become one pipe, to catch all output: Triton's lines, Python's warnings and
tracebacks, last messages of C libraries. A thread wraps each line and writes it to the original standard error; records
of this process are written directly. A lock keeps lines apart.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import re
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime

from graphkiln_backend.system.closing import Closeable

# Triton (24.10) writes a header before each message, in one of two forms (`--log-format`), and the message as a JSON
# string, unless the environment has `TRITON_SERVER_ESCAPE_LOG_MESSAGES=FALSE`. Messages about a request begin with its
# id, which instances (`triton.log`) write as a JSON string, so that no id chosen by a client can forge the end.
#
# Source: Triton common, `src/logging.cc`; Triton core, `InferenceRequest::LogRequest`.

# Triton's letters -> names of Python's levels, in lower case.
_LEVELS = {"I": "info", "W": "warning", "E": "error", "F": "critical", "V": "debug"}
_HEADER = re.compile(
    r"(?:(?P<short>[IWEFV])\d{4} \d\d:\d\d:\d\d\.\d+|\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ (?P<iso>[IWEFV]))"
    r" \d+ (?P<location>[^\s\]]+:\d+)\] ?(?P<text>.*)",
    re.DOTALL,
)
_OURS = "graphkiln: "
_INSTANCE = re.compile(
    r'graphkiln: (?P<model>[^\s:]+): (?:\[request id: (?P<request_id>"(?:[^"\\]|\\.)*")\] )?(?P<text>.*)', re.DOTALL
)
_TRITONS_REQUEST = re.compile(r"\[request id: (?P<request_id>.*?)\] (?P<text>.*)", re.DOTALL)
_UNKNOWN_ID = "<id_unknown>"  # what Triton writes for a request without an id


@dataclass(frozen=True, kw_only=True, slots=True)
class LogRecord:
    """One event of the log.

    Attributes:
        message: First line.
        level: `debug`, `info`, `warning`, `error` or `critical`.
        source: `graphkiln`, `triton`, or `other` for unformatted text.
        model: The model, if known.
        request_id: `id` of the request, as given by the client.
        location: Source location in Triton.
        details: Further lines, such as a traceback.
    """

    message: str
    level: str = "info"
    source: str = "graphkiln"
    model: str = ""
    request_id: str = ""
    location: str = ""
    details: str = ""

    def to_json(self, now: datetime | None = None) -> str:
        """Format as one line of ASCII, without empty fields."""
        at = (now or datetime.now(UTC)).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        fields = {name: value for name in _FIELDS if (value := getattr(self, name))}
        return json.dumps({"time": at, "level": self.level, "source": self.source, "message": self.message, **fields})


_FIELDS = ("model", "request_id", "location", "details")


def of_event(record: logging.LogRecord) -> LogRecord:
    """Convert a record of this process; its `extra` may have `model` and `request_id`."""
    message, details = _split(record.getMessage())
    if record.exc_info:
        details = "\n".join(filter(None, (details, logging.Formatter().formatException(record.exc_info))))
    return LogRecord(
        message=message,
        level=record.levelname.lower(),
        model=getattr(record, "model", ""),
        request_id=getattr(record, "request_id", ""),
        details=details,
    )


def of_line(line: str) -> LogRecord:
    """Parse a line of a child process, without line end."""
    if header := _HEADER.fullmatch(line):
        level = _LEVELS[header["short"] or header["iso"]]
        return _of_triton(_unquote(header["text"]), level, header["location"])
    if line.startswith(_OURS):
        return LogRecord(message=line.removeprefix(_OURS))
    return LogRecord(message=line, level="warning", source="other")


def _of_triton(text: str, level: str, location: str) -> LogRecord:
    """Parse a message of Triton or of an instance."""
    if ours := _INSTANCE.fullmatch(text):
        message, details = _split(ours["text"])
        request_id = json.loads(ours["request_id"] or '""')
        return LogRecord(level=level, message=message, details=details, model=ours["model"], request_id=request_id)
    request_id = ""
    if named := _TRITONS_REQUEST.match(text):
        request_id, text = named["request_id"].replace(_UNKNOWN_ID, ""), named["text"]
    message, details = _split(text)
    return LogRecord(
        source="triton", level=level, message=message, details=details, request_id=request_id, location=location
    )


def _unquote(text: str) -> str:
    """Decode a message of Triton: a JSON string, or plain text."""
    try:
        read = json.loads(text)
    except ValueError:
        return text
    return read if isinstance(read, str) else text


def _split(text: str) -> tuple[str, str]:
    """Split off the first line."""
    message, _, details = text.strip("\n").partition("\n")
    return message, details


_OUTPUTS = (1, 2)  # standard output and standard error
# Capacity while this process is stopped; the kernel's default is 64 kB. Source: fcntl(2).
_PIPE_BYTES = 1 << 20
_LONGEST_LINE = 1 << 16  # longer lines are split, because a line is kept in memory
_END_S = 5.0  # to wait for processes that still hold the pipe


class LogPipe(Closeable):
    """Redirect both outputs until it is closed and everything was written."""

    def __init__(self) -> None:
        _flush()
        self._lock = threading.Lock()
        self._before = [os.dup(output) for output in _OUTPUTS]
        self._target = self._before[-1]
        reading, writing = os.pipe()
        with suppress(OSError):  # above the system's limit for users
            fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
        for output in _OUTPUTS:
            os.dup2(writing, output)
        os.close(writing)
        self._thread = threading.Thread(target=self._pass_on, args=(reading,), name="log", daemon=True)
        self._thread.start()

    def write(self, record: LogRecord) -> None:
        """Write one event; drop it if the disk is full or the reader is gone."""
        line = record.to_json().encode() + b"\n"
        with self._lock, suppress(OSError):
            while line:
                line = line[os.write(self._target, line) :]

    def close(self) -> None:
        """Restore the outputs."""
        _flush()
        for before, output in zip(self._before, _OUTPUTS, strict=True):
            os.dup2(before, output)
        self._thread.join(_END_S)
        if not self._thread.is_alive():
            for before in self._before:
                os.close(before)

    def _pass_on(self, reading: int) -> None:
        with os.fdopen(reading, "rb") as lines:
            for line in iter(lambda: lines.readline(_LONGEST_LINE), b""):
                text = line.decode(errors="backslashreplace").rstrip("\r\n")
                if text:
                    self.write(of_line(text))


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # a full disk, or closed
            stream.flush()


class LogPipeHandler(logging.Handler):
    """A logging handler that writes to a `LogPipe`."""

    def __init__(self, pipe: LogPipe) -> None:
        super().__init__()
        self._pipe = pipe

    def emit(self, record: logging.LogRecord) -> None:
        """Write one event."""
        self._pipe.write(of_event(record))


class NoiseFilter:
    """Copy a server's output to standard error, without misleading messages.

    Triton, built with CUDA, logs an error and a warning about the missing driver at each start on a CPU. Its stubs
    (since 26.04) print a fatal Python error on a normal exit. A thread copies everything else from a pipe until the
    last process that holds the pipe exits.

    Triton logs a failed load once for each instance and twice for the version, with paths of the run folder; the
    supervisor logs the reason once.

    Args:
        has_gpu: Keep messages about the driver.
        on_failed: Called with model, version and Triton's reason of each failed load, whose messages are removed; None
            to keep them.
    """

    _NO_DRIVER = re.compile(
        rb"[^\n]*(?:CudaDriverHelper has not been initialized|failed to allocate pinned system memory)[^\n]*\n"
    )
    _FINALIZING = re.compile(
        rb"Fatal Python error: [^\n]*\nPython runtime state: finalizing[^\n]*\n\n?"
        rb"(?:(?:Current t|T)hread 0x[^\n]*\n(?:  [^\n]*\n)*\n?)*"
    )

    _FAILED = re.compile(rb"[^\n]*\] \"failed to load '([^'\n]+)' version (\d+): ([^\n]*)\"\n")
    _FAILURES = re.compile(
        rb'[^\n]* backend_model[^\n ]*\] "ERROR: Failed to create instance: [^\n]*\n'
        rb"|[^\n]* tritonserver[^\n ]*\] [^\n]*: (?:failed to load all models|load failed for model )[^\n]*\n"
        rb"|error: creating server: [^\n]* - (?:failed to load all models|load failed for model )[^\n]*\n"
        rb"(?:\nAt:\n(?:  [^\n]*\n)*;?\n?)?"
    )

    def __init__(self, *, has_gpu: bool = False, on_failed: Callable[[str, int, str], None] | None = None) -> None:
        self._noise = (self._FINALIZING,) if has_gpu else (self._FINALIZING, self._NO_DRIVER)
        self._on_failed = on_failed
        self._thread = threading.Thread(target=self._copy, name="noise filter", daemon=True)
        self._reading, self._writing = os.pipe()
        with suppress(OSError):  # above the system's limit for users
            fcntl.fcntl(self._writing, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)

    def fileno(self) -> int:
        """Writing end of the pipe."""
        return self._writing

    def start(self) -> None:
        """Begin to copy, after the server has inherited the pipe."""
        os.close(self._writing)
        self._thread.start()

    def wait(self) -> None:
        """Wait until everything that an ended server has written is copied."""
        self._thread.join(_END_S)

    def _copy(self) -> None:
        with os.fdopen(self._reading, "rb", buffering=0) as pipe:
            rest = b""
            while chunk := pipe.read(1 << 16):
                whole, end, rest = (rest + chunk).rpartition(b"\n")
                kept = whole + end
                for noise in self._noise:
                    kept = noise.sub(b"", kept)
                if self._on_failed:
                    kept = self._FAILURES.sub(b"", self._FAILED.sub(self._take_failure, kept))
                if len(rest) > _LONGEST_LINE:
                    kept, rest = kept + rest, b""
                _write(kept)
            _write(rest)

    def _take_failure(self, line: re.Match[bytes]) -> bytes:
        model, version, reason = (part.decode(errors="replace") for part in line.groups())
        if self._on_failed:
            self._on_failed(model, int(version), _unquote(f'"{reason}"'))
        return b""


def _write(text: bytes) -> None:
    """Write to standard error; drop the text if the disk is full or the reader is gone."""
    with suppress(OSError):
        while text:
            text = text[os.write(2, text) :]
