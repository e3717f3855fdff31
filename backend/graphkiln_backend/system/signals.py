"""Signals that ask a process to stop: as an error that closes what is open on the way out, or as an event of a loop.

SIGHUP comes when a terminal is closed; it stays ignored where `nohup` asked for that. A shell starts background jobs
with SIGINT ignored: `kill -INT` ends them all the same.
"""

from __future__ import annotations

import math
import os
import select
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

from graphkiln_backend.system.closing import Closeable

_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
# Signals this close are one wish to stop: `timeout` sends its signal to the process and once more to its group, and a
# terminal that is closed may send SIGHUP and SIGTERM. Ctrl-C pressed twice on purpose takes longer.
_TOGETHER_S = 0.3


class _Raiser:
    """A handler that raises when the first of its signals comes, and ignores them from then on."""

    def __init__(self, handled: Sequence[signal.Signals], error: Callable[[int], BaseException]) -> None:
        self.handled, self._error = handled, error
        self.came = False

    def __call__(self, number: int, _: object) -> None:
        self.came = True
        for each in self.handled:
            signal.signal(each, signal.SIG_IGN)
        raise self._error(number)


@contextmanager
def raising_once(numbers: Sequence[signal.Signals], error: Callable[[int], BaseException]) -> Iterator[None]:
    """Let signals raise an error in the block, once: another one does not disturb the cleanup.

    Of blocks within each other one raises, once, so that the cleanup of the outer ones is not disturbed either. In
    another thread than the main one nothing changes: signals do not come there.

    Args:
        numbers: The signals.
        error: Makes the error, given the number of the signal that came.
    """
    is_main = threading.current_thread() is threading.main_thread()
    raiser = _Raiser(_without_ignored_hangup(numbers) if is_main else [], error)
    before = {number: signal.signal(number, raiser) for number in raiser.handled}
    try:
        yield
    finally:
        _put_back(before, raiser)


def _put_back(before: Mapping[signal.Signals, Any], raiser: _Raiser) -> None:
    """Restore handlers; where a signal came in a block within another, all stay ignored until that one ends."""
    around = [handler for handler in before.values() if isinstance(handler, _Raiser)]
    for outer in around:
        outer.came |= raiser.came
    for number, handler in before.items():
        signal.signal(number, signal.SIG_IGN if around and raiser.came else handler)


def _without_ignored_hangup(numbers: Sequence[signal.Signals]) -> list[signal.Signals]:
    ignored = {signal.SIGHUP} if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN else set()
    return [number for number in numbers if number not in ignored]


class Stopped(KeyboardInterrupt):
    """Ctrl-C, SIGTERM or SIGHUP, where they end a command in order.

    Args:
        number: The signal.

    Attributes:
        exit_code: As a shell reports a program that this signal ended.
    """

    def __init__(self, number: int) -> None:
        super().__init__()
        self.exit_code = 128 + number


@contextmanager
def stopping_in_order() -> Iterator[None]:
    """Let Ctrl-C, SIGTERM and SIGHUP raise `Stopped` in the block, once."""
    with raising_once(_STOP_SIGNALS, Stopped):
        yield


@contextmanager
def ending_on_signals() -> Iterator[None]:
    """Let each signal end the process with code 0, in order: for the time before `StopSignals`. Main thread only."""

    def end(*_: object) -> None:
        raise SystemExit(0)

    before = {number: signal.signal(number, end) for number in _without_ignored_hangup(_STOP_SIGNALS)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class Interrupted(BaseException):
    """A signal came inside `StopSignals.interrupting`; like KeyboardInterrupt, it is no error."""


class ServerStopping(Exception):
    """The server stops: work beside it gives up."""


class StopSignals(Closeable):
    """Count the signals that ask a process to stop, from its creation until it is closed. Main thread only.

    Attributes:
        count: The number of signals so far; those that come together count as one.
    """

    def __init__(self) -> None:
        self.count = 0
        self._counted_at = -math.inf
        self._interrupting = False
        self._wake, self._waker = socket.socketpair()
        self._wake.setblocking(False)
        self._waker.setblocking(False)
        self._old_descriptor = signal.set_wakeup_fd(self._waker.fileno(), warn_on_full_buffer=False)
        numbers = _without_ignored_hangup(_STOP_SIGNALS)
        self._old_handlers = {number: signal.signal(number, self._handle) for number in numbers}

    @contextmanager
    def interrupting(self) -> Iterator[None]:
        """Let a signal raise `Interrupted` inside the block, once."""
        self._interrupting = True
        try:
            yield
        finally:
            self._interrupting = False

    def wait(self, processes: Sequence[int], timeout_s: float) -> None:
        """Sleep until one of the processes ends, a signal comes, or the time is over."""
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
        """Restore the former handlers."""
        signal.set_wakeup_fd(self._old_descriptor)
        for number, handler in self._old_handlers.items():
            signal.signal(number, handler)
        self._wake.close()
        self._waker.close()

    def _handle(self, *_: object) -> None:
        now = time.monotonic()
        if now - self._counted_at < _TOGETHER_S:
            return
        self._counted_at = now
        self.count += 1
        if self._interrupting:
            self._interrupting = False
            raise Interrupted
