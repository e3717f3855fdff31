"""Run the asynchronous client's coroutines without an event loop.

The client is written once, as coroutines. A blocking transport is never suspended: its coroutines do their work when
they are driven and are over. So the synchronous client is the asynchronous one, driven to its end in one step, in
the caller's thread.
"""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


def run(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine that never waits for anything but a blocking transport, and return its result.

    Raises:
        RuntimeError: It does wait.
    """
    try:
        coroutine.send(None)
    except StopIteration as stop:
        result: T = stop.value
        return result
    coroutine.close()
    raise RuntimeError("a coroutine on a blocking transport was suspended")
