"""Maps that keep the order, several items at a time."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator

import pytest

from graphkiln_client.ordered_map import map_in_tasks, map_in_threads


def numbers(read: list[int], count: int = 1000) -> Iterator[int]:
    for number in range(count):
        read.append(number)
        yield number


class TestInThreads:
    def test_results_keep_the_order_of_the_items(self) -> None:
        def work(number: int) -> int:
            time.sleep(0.002 * (5 - number % 5))
            return number * number

        assert list(map_in_threads(work, range(20), 4)) == [number * number for number in range(20)]

    def test_no_items(self) -> None:
        assert list(map_in_threads(str, [], 3)) == []

    def test_as_many_at_once_as_allowed(self) -> None:
        inside, most, lock = 0, 0, threading.Lock()

        def work(_: int) -> None:
            nonlocal inside, most
            with lock:
                inside += 1
                most = max(most, inside)
            time.sleep(0.005)
            with lock:
                inside -= 1

        list(map_in_threads(work, range(12), 3))
        assert most == 3

    def test_items_are_read_lazily_and_in_the_callers_thread(self) -> None:
        read: list[int] = []
        results = map_in_threads(lambda number: number, numbers(read), 2)
        assert read == []
        assert next(results) == 0
        assert len(read) == 4, "twice as many as threads: the next item is ready when a thread is"
        results.close()

    def test_an_error_ends_the_map_where_it_is(self) -> None:
        def work(number: int) -> int:
            if number == 3:
                raise ValueError("third")
            return number

        results = map_in_threads(work, range(1000), 2)
        assert [next(results) for _ in range(3)] == [0, 1, 2]
        with pytest.raises(ValueError, match="third"):
            next(results)

    def test_an_error_of_the_items_is_the_callers(self) -> None:
        def items() -> Iterator[int]:
            yield 1
            raise OSError("no such folder")

        with pytest.raises(OSError, match="no such folder"):
            list(map_in_threads(str, items(), 2))

    def test_closing_it_leaves_no_thread(self) -> None:
        before = threading.active_count()
        results = map_in_threads(lambda number: number, numbers([]), 4)
        next(results)
        results.close()
        assert threading.active_count() == before

    def test_what_has_not_begun_is_not_done_after_closing(self) -> None:
        done: list[int] = []

        def work(number: int) -> int:
            time.sleep(0.1 if number else 0)
            done.append(number)
            return number

        results = map_in_threads(work, range(100), 2)
        next(results)
        results.close()
        assert 3 not in done, "it waited for a thread"


class TestInTasks:
    def test_results_keep_the_order_of_the_items(self) -> None:
        async def work(number: int) -> int:
            await asyncio.sleep(0.002 * (5 - number % 5))
            return number * number

        async def main() -> list[int]:
            return [result async for result in map_in_tasks(work, range(20), 4)]

        assert asyncio.run(main()) == [number * number for number in range(20)]

    def test_as_many_at_once_as_allowed(self) -> None:
        inside, most = 0, 0

        async def work(_: int) -> None:
            nonlocal inside, most
            inside += 1
            most = max(most, inside)
            await asyncio.sleep(0.001)
            inside -= 1

        async def main() -> None:
            async for _ in map_in_tasks(work, range(12), 3):
                pass

        asyncio.run(main())
        assert most == 3

    def test_items_are_read_lazily(self) -> None:
        read: list[int] = []

        async def work(number: int) -> int:
            return number

        async def main() -> None:
            results = map_in_tasks(work, numbers(read), 2)
            assert await anext(results) == 0
            assert len(read) == 2
            await results.aclose()

        asyncio.run(main())

    def test_an_error_cancels_what_is_under_way(self) -> None:
        cancelled: list[int] = []

        async def work(number: int) -> int:
            if number == 0:
                raise ValueError("first")
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                cancelled.append(number)
                raise
            return number

        async def main() -> None:
            async for _ in map_in_tasks(work, range(10), 3):
                pass

        with pytest.raises(ValueError, match="first"):
            asyncio.run(asyncio.wait_for(main(), 5))
        assert cancelled == [1, 2]

    def test_closing_it_leaves_no_task(self) -> None:
        async def work(number: int) -> int:
            await asyncio.sleep(0 if number == 0 else 60)
            return number

        async def main() -> int:
            results = map_in_tasks(work, range(10), 4)
            await anext(results)
            await results.aclose()
            return len(asyncio.all_tasks())

        assert asyncio.run(main()) == 1
