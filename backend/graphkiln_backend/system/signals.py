"""Handle signals that ask a process to stop: as an exception in commands, as an event in the supervisor's loop.

SIGHUP (a closed terminal) stays ignored if `nohup` ignored it. SIGINT is handled even if it was ignored, because shells
start background jobs that way and `kill -INT` should end them.
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
# Signals within this time count as one: `timeout` signals the process and then its group, and a closed terminal may
# send SIGHUP and SIGTERM. Two deliberate Ctrl-C are further apart.
_TOGETHER_S = 0.3


class _Raiser:
    """Signal handler that raises once, and ignores its signals afterwards."""

    def __init__(self, handled: Sequence[signal.Signals], error: Callable[[int], BaseException]) -> None:
        self.handled, self._error = handled, error
        self.raised = False

    def __call__(self, number: int, _: object) -> None:
        self.raised = True
        for each in self.handled:
            signal.signal(each, signal.SIG_IGN)
        raise self._error(number)


@contextmanager
def raising_once(numbers: Sequence[signal.Signals], error: Callable[[int], BaseException]) -> Iterator[None]:
    """Raise an error in the block at the first of some signals; later ones do not disturb the cleanup.

    Of nested blocks only one raises. Does nothing in threads other than the main thread, which receives no signals.

    Args:
        numbers: The signals.
        error: Creates the error from the number of the signal.
    """
    is_main = threading.current_thread() is threading.main_thread()
    raiser = _Raiser(_without_ignored_hangup(numbers) if is_main else [], error)
    before = {number: signal.signal(number, raiser) for number in raiser.handled}
    try:
        yield
    finally:
        _restore(before, raiser)


def _restore(before: Mapping[signal.Signals, Any], raiser: _Raiser) -> None:
    """Restore handlers; after a signal in a nested block, keep ignoring signals until the outer block ends."""
    outer_raisers = [handler for handler in before.values() if isinstance(handler, _Raiser)]
    for outer in outer_raisers:
        outer.raised |= raiser.raised
    for number, handler in before.items():
        signal.signal(number, signal.SIG_IGN if outer_raisers and raiser.raised else handler)


def _without_ignored_hangup(numbers: Sequence[signal.Signals]) -> list[signal.Signals]:
    ignored = {signal.SIGHUP} if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN else set()
    return [number for number in numbers if number not in ignored]


class Stopped(KeyboardInterrupt):
    """A signal asked this command to stop.

    Attributes:
        exit_code: 128 plus the signal's number, as shells report it.
    """

    def __init__(self, number: int) -> None:
        super().__init__()
        self.exit_code = 128 + number


@contextmanager
def stopping_in_order() -> Iterator[None]:
    """Raise `Stopped` in the block at the first SIGINT, SIGTERM or SIGHUP."""
    with raising_once(_STOP_SIGNALS, Stopped):
        yield


@contextmanager
def ending_on_signals() -> Iterator[None]:
    """Exit with code 0 at each stop signal: used before `StopSignals` exists. Main thread only."""

    def end(*_: object) -> None:
        raise SystemExit(0)

    before = {number: signal.signal(number, end) for number in _without_ignored_hangup(_STOP_SIGNALS)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class Interrupted(BaseException):
    """A signal arrived inside `StopSignals.interrupting`; like KeyboardInterrupt, not an `Exception`."""


class ServerStopping(Exception):
    """The server is stopping: background work should give up."""


class StopSignals(Closeable):
    """Count stop signals until closed. Main thread only.

    Attributes:
        count: Signals so far; those within `_TOGETHER_S` count as one.
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
        """Raise `Interrupted` inside the block at the first signal, or before it if there was one already."""
        self._interrupting = True
        try:
            if self.count:
                raise Interrupted
            yield
        finally:
            self._interrupting = False

    def wait(self, processes: Sequence[int], timeout_s: float) -> None:
        """Sleep until one of the processes ends, a signal arrives, or the timeout is over."""
        poll = select.poll()  # select() does not support descriptors above 1023
        poll.register(self._wake, select.POLLIN)
        with ExitStack() as stack:
            for process in processes:
                try:
                    descriptor = os.pidfd_open(process)
                except ProcessLookupError:
                    return
                except OSError:  # too many open files: the caller checks the other processes after the timeout
                    break
                stack.callback(os.close, descriptor)
                poll.register(descriptor, select.POLLIN)
            poll.poll(timeout_s * 1e3)
        with suppress(BlockingIOError):
            self._wake.recv(4096)

    def close(self) -> None:
        """Restore the previous handlers."""
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
