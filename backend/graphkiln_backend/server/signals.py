"""SIGTERM, SIGINT and SIGHUP, as something that a loop can look at, wait for, or be interrupted by."""

from __future__ import annotations

import math
import os
import select
import signal
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress

from graphkiln_backend.system.closing import Closeable
from graphkiln_backend.system.stop_signals import raising_once, without_ignored_hangup

# Signals this close are one wish to stop: `timeout` sends its signal to the process and once more to its group, and a
# terminal that is closed may send SIGHUP and SIGTERM. Nobody presses Ctrl-C twice that fast and means it.
_TOGETHER_S = 0.3


class Interrupted(BaseException):
    """A signal came inside `StopSignals.interrupting`; like KeyboardInterrupt, it is no error."""


class ServerStopping(Exception):
    """The server stops: what waited for something else gives up."""


class StopSignals(Closeable):
    """Counts the signals that ask a process to stop, from its creation until it is closed. For the main thread only.

    Attributes:
        count: How many have come; those that come together count as one.
    """

    def __init__(self) -> None:
        self.count = 0
        self._counted_at = -math.inf
        self._interrupting = False
        self._wake, self._waker = socket.socketpair()
        self._wake.setblocking(False)
        self._waker.setblocking(False)
        self._old_descriptor = signal.set_wakeup_fd(self._waker.fileno(), warn_on_full_buffer=False)
        self._old_handlers = {number: signal.signal(number, self._handle) for number in _stop_signals()}

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
        poll = select.poll()  # select() takes no descriptor above 1023
        poll.register(self._wake, select.POLLIN)
        with ExitStack() as stack:
            for process in processes:
                try:
                    descriptor = os.pidfd_open(process)
                except ProcessLookupError:
                    return
                except OSError:  # no more files may be open: the end of the others is seen at the next look
                    break
                stack.callback(os.close, descriptor)
                poll.register(descriptor, select.POLLIN)
            poll.poll(timeout_s * 1e3)
        with suppress(BlockingIOError):
            self._wake.recv(4096)

    def close(self) -> None:
        """Gives the signals back to their former handlers."""
        signal.set_wakeup_fd(self._old_descriptor)
        for number, handler in self._old_handlers.items():
            signal.signal(number, handler)
        self._wake.close()
        self._waker.close()

    def _handle(self, *_: object) -> None:
        if time.monotonic() - self._counted_at >= _TOGETHER_S:
            self._counted_at = time.monotonic()
            self._count()

    def _count(self) -> None:
        self.count += 1
        if self._interrupting:
            self._interrupting = False
            raise Interrupted


@contextmanager
def ending_on_signals() -> Iterator[None]:
    """Lets each signal end the process with code 0, in good order: for the time before `StopSignals`.

    For the main thread only.
    """
    before = {number: signal.signal(number, _end) for number in _stop_signals()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class Stopped(KeyboardInterrupt):
    """Ctrl-C, SIGTERM or SIGHUP, where they end a command in order.

    Args:
        number: Of the signal.

    Attributes:
        exit_code: As a shell reports a program that this signal ended.
    """

    def __init__(self, number: int) -> None:
        super().__init__()
        self.exit_code = 128 + number


@contextmanager
def stopping_in_order() -> Iterator[None]:
    """Lets Ctrl-C, SIGTERM and SIGHUP raise `Stopped` in the block, once: what then is given back nothing disturbs.

    In another thread than the main one nothing changes: signals do not come there.
    """
    with raising_once([signal.SIGINT, signal.SIGTERM, signal.SIGHUP], Stopped):
        yield


def _end(*_: object) -> None:
    raise SystemExit(0)


def _stop_signals() -> list[signal.Signals]:
    """What ends the process.

    A shell starts background jobs with SIGINT ignored: `kill -INT` ends them all the same.
    """
    return without_ignored_hangup([signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
