"""Signals that ask a process to stop, as errors: what is open is closed on the way out."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager


def without_ignored_hangup(numbers: Sequence[signal.Signals]) -> list[signal.Signals]:
    """Those signals that may be handled: SIGHUP comes when a terminal is closed, and stays ignored where `nohup` asked.

    Args:
        numbers: Of the signals.
    """
    ignored = {signal.SIGHUP} if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN else set()
    return [number for number in numbers if number not in ignored]


@contextmanager
def raising_once(numbers: Sequence[signal.Signals], error: Callable[[int], BaseException]) -> Iterator[None]:
    """Lets signals raise an error in the block, once: what then is given back is not disturbed by another.

    In another thread than the main one nothing changes: signals do not come there.

    Args:
        numbers: Of the signals; an ignored SIGHUP stays ignored.
        error: Makes what is raised, given the number of the signal that came.
    """
    is_main = threading.current_thread() is threading.main_thread()
    handled = without_ignored_hangup(numbers) if is_main else []

    def interrupt(number: int, _: object) -> None:
        for each in handled:
            signal.signal(each, signal.SIG_IGN)
        raise error(number)

    before = {number: signal.signal(number, interrupt) for number in handled}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
