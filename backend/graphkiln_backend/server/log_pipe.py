"""What a service and everything that it starts says, as JSON lines on standard error.

Both of its outputs become one pipe, so that nothing escapes: Triton's lines, Python's warnings and tracebacks, what a C
library says before it aborts, Triton's last word on standard output. A thread wraps each line and writes it where
standard error went before; what this process logs itself goes there without a detour. A lock keeps lines apart.
"""

from __future__ import annotations

import fcntl
import logging
import os
import sys
import threading
from contextlib import suppress

from graphkiln_backend.server.log_records import LogRecord, of_event, of_line
from graphkiln_backend.system.closing import Closeable

_OUTPUTS = (1, 2)
"""Standard output and standard error."""
_PIPE_BYTES = 1 << 20
"""Room for what is logged while this process is stopped; 64 kB is the kernel's default. Source: fcntl(2)."""
_LONGEST_LINE = 1 << 16
"""More without an end is several lines: a line is kept in memory."""
_END_S = 5.0
"""What still holds the pipe then is a process that this one did not start, or could not end."""


class LogPipe(Closeable):
    """Wraps both outputs until it is closed, when all that was written has been passed on."""

    def __init__(self) -> None:
        _flush()
        self._lock = threading.Lock()
        self._before = [os.dup(output) for output in _OUTPUTS]
        self._target = self._before[-1]
        reading, writing = os.pipe()
        with suppress(OSError):  # more than the machine allows an ordinary user
            fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
        for output in _OUTPUTS:
            os.dup2(writing, output)
        os.close(writing)
        self._thread = threading.Thread(target=self._pass_on, args=(reading,), name="log", daemon=True)
        self._thread.start()

    def write(self, record: LogRecord) -> None:
        """Writes one event.

        A full disk and a reader that has ended are no reason to end a service: what cannot be written is lost.
        """
        line = record.to_json().encode() + b"\n"
        with self._lock, suppress(OSError):
            while line:
                line = line[os.write(self._target, line) :]

    def close(self) -> None:
        """Gives the outputs back."""
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
    """What the loggers of this process log.

    Args:
        pipe: Where it goes.
    """

    def __init__(self, pipe: LogPipe) -> None:
        super().__init__()
        self._pipe = pipe

    def emit(self, record: logging.LogRecord) -> None:
        """Writes one event."""
        self._pipe.write(of_event(record))
