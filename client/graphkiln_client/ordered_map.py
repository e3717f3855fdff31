"""Maps work over items, several at a time, and yields the results in the order of the items."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

T = TypeVar("T")
R = TypeVar("R")


def map_in_threads(work: Callable[[T], R], items: Iterable[T], concurrency: int) -> Generator[R]:
    """Maps in as many threads. Items are read lazily, in the caller's thread; an error ends the map.

    Args:
        work: Called for each item.
        items: What to map.
        concurrency: How many threads.
    """
    pending: deque[Future[R]] = deque()
    with ThreadPoolExecutor(concurrency, thread_name_prefix="graphkiln-client") as pool:
        try:
            for item in items:
                pending.append(pool.submit(work, item))
                if len(pending) >= 2 * concurrency:  # the next item is ready when a thread is
                    yield pending.popleft().result()
            while pending:
                yield pending.popleft().result()
        finally:
            for future in pending:
                future.cancel()


async def map_in_tasks(
    work: Callable[[T], Coroutine[Any, Any, R]], items: Iterable[T], concurrency: int
) -> AsyncGenerator[R]:
    """Maps in as many tasks of the running event loop. Items are read lazily; an error ends the map.

    Args:
        work: Called for each item.
        items: What to map.
        concurrency: How many tasks.
    """
    pending: deque[asyncio.Task[R]] = deque()
    try:
        for item in items:
            pending.append(asyncio.create_task(work(item)))
            if len(pending) >= concurrency:
                yield await pending.popleft()
        while pending:
            yield await pending.popleft()
    finally:
        for task in pending:
            task.cancel()
        await asyncio.gather(*pending, return_exceptions=True)
