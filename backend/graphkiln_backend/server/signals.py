"""SIGTERM and SIGINT, as something that a loop can look at, wait for, or be interrupted by."""

from __future__ import annotations

import os
import select
import signal
import socket
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

from graphkiln_backend.graph.closing import Closeable


class Interrupted(Exception):
    """A signal came inside `StopSignals.interrupting`."""


class StopSignals(Closeable):
    """Counts the signals that ask a process to stop, from its creation until it is closed. For the main thread only.

    Attributes:
        count: How many have come.
    """

    def __init__(self) -> None:
        self.count = 0
        self._interrupting = False
        self._wake, self._waker = socket.socketpair()
        self._wake.setblocking(False)
        self._waker.setblocking(False)
        self._old_descriptor = signal.set_wakeup_fd(self._waker.fileno(), warn_on_full_buffer=False)
        self._old_handlers = {number: signal.signal(number, self._handle) for number in (signal.SIGTERM, signal.SIGINT)}

    @contextmanager
    def interrupting(self) -> Iterator[None]:
        """Lets a signal raise `Interrupted` inside the block, once.

        Raises:
            Interrupted: A signal came.
        """
        self._interrupting = True
        try:
            yield
        finally:
            self._interrupting = False

    def wait(self, processes: Sequence[int], timeout_s: float) -> None:
        """Sleeps until one of the processes ends, a signal comes, or the time is over."""
        with ExitStack() as stack:
            descriptors = []
            for process in processes:
                try:
                    descriptors.append(os.pidfd_open(process))
                except ProcessLookupError:
                    return
                stack.callback(os.close, descriptors[-1])
            ready, _, _ = select.select([*descriptors, self._wake.fileno()], [], [], timeout_s)
        if self._wake.fileno() in ready:
            self._wake.recv(4096)

    def close(self) -> None:
        """Gives the signals back to their former handlers."""
        signal.set_wakeup_fd(self._old_descriptor)
        for number, handler in self._old_handlers.items():
            signal.signal(number, handler)
        self._wake.close()
        self._waker.close()

    def _handle(self, *_: object) -> None:
        self.count += 1
        if self._interrupting:
            self._interrupting = False
            raise Interrupted
