"""Time limit of one computation in a command, since a graph may contain an endless loop.

The server does not need it: its supervisor kills an instance that computes for too long, and versions are admitted in a
separate process. If a runtime cannot be interrupted, the command exits.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from graphkiln_backend.graph.errors import ExecutionError

DEFAULT_COMPUTE_LIMIT_S = 120.0  # for one batch: a hundred times what a large model on one slow core takes
HINT = "does a loop of the graph ever end? If the machine is only slow: --compute-limit SECONDS"
_GRACE_S = 5.0  # for a runtime to stop after an interrupt
_CHECKS = 10
_EXIT_CODE = 1


class ComputeLimitExceeded(Exception):
    """A computation exceeded the limit. Not a `GraphkilnError`, after which another attempt may follow."""


class ComputeLimit:
    """Watchdog thread for computations; made by `limit_computing`.

    Args:
        seconds: Limit of one computation.
        give_up: Ends the process; called with a message if a computation cannot be interrupted.
        grace_s: Seconds that a computation may continue after an interrupt.
    """

    def __init__(self, seconds: float, give_up: Callable[[str], None], grace_s: float = _GRACE_S) -> None:
        self._seconds = seconds
        self._give_up = give_up
        self._grace_s = grace_s
        self._running: dict[int, tuple[float, Callable[[], object]]] = {}
        self._interrupted: set[int] = set()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="compute-limit", daemon=True)

    @property
    def message(self) -> str:
        """Message for a computation that exceeds the limit."""
        return f"one batch was not computed within {self._seconds:g} s (--compute-limit)"

    @contextmanager
    def computation(self, interrupt: Callable[[], object]) -> Iterator[None]:
        """Watch a computation in this thread.

        Args:
            interrupt: Interrupts the runtime; called in another thread.

        Raises:
            ComputeLimitExceeded: This or an earlier computation took too long.
        """
        key = threading.get_ident()
        self._check()
        self._running[key] = (time.monotonic(), interrupt)
        try:
            yield
        except BaseException:  # runtimes report an interrupt as different errors
            self._check()
            raise
        finally:
            self._running.pop(key, None)

    def begin(self) -> None:
        """Start the thread."""
        self._thread.start()

    def end(self) -> None:
        """End the thread."""
        self._closing.set()
        self._thread.join()

    def _check(self) -> None:
        if self._interrupted:
            raise ComputeLimitExceeded

    def _watch(self) -> None:
        while not self._closing.wait(min(self._seconds / _CHECKS, 1.0)):
            for key, (begun, interrupt) in list(self._running.items()):
                seconds = time.monotonic() - begun
                if seconds > self._seconds + self._grace_s:
                    self._give_up(f"{self.message}, and the runtime cannot be interrupted")
                elif seconds > self._seconds and key not in self._interrupted:
                    self._interrupted.add(key)
                    interrupt()


_current: ComputeLimit | None = None


def current_limit() -> ComputeLimit | None:
    """Return the active limit, or None."""
    return _current


@contextmanager
def limit_computing(seconds: float) -> Iterator[None]:
    """Limit every computation of sessions during the block, in all threads.

    Args:
        seconds: Limit of one computation.

    Raises:
        ExecutionError: A computation exceeded the limit.
    """
    global _current  # noqa: PLW0603 - sessions are run in many places and threads, a process has one command
    limit = ComputeLimit(seconds, _end_process)
    limit.begin()
    _current = limit
    try:
        yield
    except ComputeLimitExceeded as error:
        raise ExecutionError(limit.message, hint=HINT) from error
    finally:
        _current = None
        limit.end()


def _end_process(message: str) -> None:
    """Exit immediately, since the main thread is blocked in the runtime."""
    sys.stderr.write(f"graphkiln: {message}\n{HINT}\n")
    sys.stderr.flush()
    os._exit(_EXIT_CODE)
