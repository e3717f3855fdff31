"""Calls side by side, in threads that no process waits for when it ends.

The threads of `concurrent.futures` are joined then, after all that is queued: a server that is told to stop while it
copies a store would stay until the last file is there, and be killed for it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import TypeVar

_Item = TypeVar("_Item")


def call_each(call: Callable[[_Item], object], items: Iterable[_Item], at_once: int) -> None:
    """Calls a function with each item.

    Args:
        call: The function.
        items: What it is called with.
        at_once: How many calls run at most.

    Raises:
        BaseException: What the first call that failed raised, when those beside it have ended; none is begun after it.
            What a signal's handler raises ends the wait at once: calls that run go on, and none is begun.
    """
    waiting: SimpleQueue[_Item] = SimpleQueue()
    for item in items:
        waiting.put(item)
    failed: list[BaseException] = []
    ended: SimpleQueue[None] = SimpleQueue()

    def work() -> None:
        with suppress(Empty):
            while not failed:
                _call(call, waiting.get_nowait(), failed)
        ended.put(None)

    threads = [threading.Thread(target=work, name="side-by-side", daemon=True) for _ in range(at_once)]
    for thread in threads:
        thread.start()
    try:
        for _ in threads:
            ended.get()
    except BaseException as stopped:
        failed.append(stopped)
        raise
    if failed:
        raise failed[0]


def _call(call: Callable[[_Item], object], item: _Item, failed: list[BaseException]) -> None:
    try:
        call(item)
    except BaseException as error:  # noqa: BLE001 - it is raised in the thread that waits
        failed.append(error)
