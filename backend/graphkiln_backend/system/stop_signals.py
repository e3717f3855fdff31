"""Signals that ask a process to stop, as errors: what is open is closed on the way out."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any


def without_ignored_hangup(numbers: Sequence[signal.Signals]) -> list[signal.Signals]:
    """Those signals that may be handled: SIGHUP comes when a terminal is closed, and stays ignored where `nohup` asked.

    Args:
        numbers: Of the signals.
    """
    ignored = {signal.SIGHUP} if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN else set()
    return [number for number in numbers if number not in ignored]


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
    """Lets signals raise an error in the block, once: what then is given back is not disturbed by another.

    Of blocks within each other one raises, once: what the outer ones give back is not disturbed either.
    In another thread than the main one nothing changes: signals do not come there.

    Args:
        numbers: Of the signals; an ignored SIGHUP stays ignored.
        error: Makes what is raised, given the number of the signal that came.
    """
    is_main = threading.current_thread() is threading.main_thread()
    raiser = _Raiser(without_ignored_hangup(numbers) if is_main else [], error)
    before = {number: signal.signal(number, raiser) for number in raiser.handled}
    try:
        yield
    finally:
        _put_back(before, raiser)


def _put_back(before: Mapping[signal.Signals, Any], raiser: _Raiser) -> None:
    """Handlers as they were; where a signal came in a block within another, all stay ignored until that one ends."""
    around = [handler for handler in before.values() if isinstance(handler, _Raiser)]
    for outer in around:
        outer.came |= raiser.came
    for number, handler in before.items():
        signal.signal(number, signal.SIG_IGN if around and raiser.came else handler)
