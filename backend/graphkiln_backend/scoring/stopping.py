"""Ends a run in order when a signal asks for it."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager

from graphkiln_backend.graph.stop_signals import raising_once
from graphkiln_backend.scoring.errors import RunInterrupted

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextmanager
def interruptible() -> Iterator[None]:
    """Within the block Ctrl-C, SIGTERM and SIGHUP raise `RunInterrupted`, once: what follows no second one disturbs.

    SIGHUP comes when a terminal is closed, and stays ignored where `nohup` asked for that.
    In another thread than the main one nothing changes: signals do not come there.
    """
    try:
        with raising_once(_SIGNALS, RunInterrupted):
            yield
    except SystemError as error:  # what compiled code that returns although its caller was interrupted becomes
        if isinstance(error.__cause__, RunInterrupted):
            raise error.__cause__ from None
        raise
