"""A thread of its own for each stage and each shard, on its own cores."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextvars import copy_context
from functools import partial
from typing import ParamSpec, TypeVar

from graphkiln_backend.system.closing import Closeable
from graphkiln_backend.system.resources import stay_on

P = ParamSpec("P")
T = TypeVar("T")


class Worker(Closeable):
    """Runs what it is given, one after the other, in a thread that stays on some cores.

    What a runtime builds in it starts its own threads there, which stay on the same cores.

    Args:
        cores: Numbers of the cores; empty for any.
        name: Of the thread.
    """

    def __init__(self, cores: Iterable[int] = (), name: str = "graphkiln-stage") -> None:
        self._pool = ThreadPoolExecutor(
            max_workers=1, thread_name_prefix=name, initializer=stay_on, initargs=(tuple(cores),)
        )

    def submit(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Runs a function after all that was submitted before, in the caller's context (`contextvars`)."""
        return self._pool.submit(copy_context().run, partial(call, *args, **kwargs))

    def close(self) -> None:
        """Waits for what runs, and ends the thread."""
        self._pool.shutdown(wait=True, cancel_futures=True)


def results_of(futures: Iterable[Future[T]]) -> list[T]:
    """What all of them came to, in order; returns when none runs any more, also where one failed.

    Whoever fed them may use their arrays for other things as soon as this returns.

    Raises:
        Exception: What the first one that failed raised.
    """
    listed = list(futures)
    wait(listed)
    return [future.result() for future in listed]
