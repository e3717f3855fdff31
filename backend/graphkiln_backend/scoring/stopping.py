"""Ends a run in order when a signal asks for it."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from graphkiln_backend.scoring.errors import RunInterrupted

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextmanager
def interruptible() -> Iterator[None]:
    """Within the block Ctrl-C, SIGTERM and SIGHUP raise `RunInterrupted`, once: what follows no second one disturbs.

    SIGHUP comes when a terminal is closed, and stays ignored where `nohup` asked for that.
    In another thread than the main one nothing changes: signals do not come there.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    numbers = [each for each in _SIGNALS if each is not signal.SIGHUP or signal.getsignal(each) != signal.SIG_IGN]

    def interrupt(number: int, _frame: FrameType | None) -> None:
        for each in numbers:
            signal.signal(each, signal.SIG_IGN)
        raise RunInterrupted(number)

    before = {number: signal.signal(number, interrupt) for number in numbers}
    try:
        yield
    except SystemError as error:  # what compiled code that returns although its caller was interrupted becomes
        if isinstance(error.__cause__, RunInterrupted):
            raise error.__cause__ from None
        raise
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
