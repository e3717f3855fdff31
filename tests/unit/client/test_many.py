"""Concurrent batches of images."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from graphkiln_backend.graph.errors import InvalidInput
from graphkiln_client.async_client import Many, map_in_tasks
from graphkiln_client.client import Client, map_in_threads


def numbers(read: list[int], count: int = 1000) -> Iterator[int]:
    for number in range(count):
        read.append(number)
        yield number


class TestMany:
    def test_report_counts_and_raises(self) -> None:
        counts: list[int] = []
        many = Many(progress=counts.append)
        assert [many.report("a"), many.report("b")] == ["a", "b"]
        with pytest.raises(InvalidInput, match="no image"):
            many.report(InvalidInput("no image"))
        assert counts == [1, 2]

    @pytest.mark.parametrize("options", [{"on_error": "ignore"}, {"batch_size": 0}, {"concurrency": 0}])
    def test_invalid_options(self, options: dict[str, Any]) -> None:
        with pytest.raises(InvalidInput, match="must be"):
            Many(**options)


@pytest.mark.parametrize(
    "one",
    ["street.jpg", b"\xff\xd8", Path("street.jpg"), Image.new("L", (2, 2)), np.zeros((4, 5, 3)), np.zeros((4, 5))],
    ids=lambda each: type(each).__name__,
)
def test_single_image_is_refused(one: Any) -> None:
    model = Client("http://localhost:1").model("m")
    with pytest.raises(InvalidInput, match="several images"):
        next(model.classify_many(one))


class TestInThreads:
    def test_results_keep_the_order_of_the_items(self) -> None:
        def work(number: int) -> int:
            time.sleep(0.002 * (5 - number % 5))
            return number * number

        assert list(map_in_threads(work, range(20), 4)) == [number * number for number in range(20)]

    def test_items_are_read_lazily(self) -> None:
        read: list[int] = []
        results = map_in_threads(lambda number: number, numbers(read), 2)
        assert read == []
        assert next(results) == 0
        assert len(read) == 4, "twice as many as threads: the next item is ready when a thread is"
        results.close()

    def test_error_ends_map(self) -> None:
        def work(number: int) -> int:
            if number == 3:
                raise ValueError("third")
            return number

        results = map_in_threads(work, range(1000), 2)
        assert [next(results) for _ in range(3)] == [0, 1, 2]
        with pytest.raises(ValueError, match="third"):
            next(results)

    def test_close_leaves_no_thread(self) -> None:
        before = threading.active_count()
        results = map_in_threads(lambda number: number, numbers([]), 4)
        next(results)
        results.close()
        assert threading.active_count() == before


class TestInTasks:
    def test_results_keep_the_order_of_the_items(self) -> None:
        async def work(number: int) -> int:
            await asyncio.sleep(0.002 * (5 - number % 5))
            return number * number

        async def main() -> list[int]:
            return [result async for result in map_in_tasks(work, range(20), 4)]

        assert asyncio.run(main()) == [number * number for number in range(20)]

    def test_error_cancels_pending_tasks(self) -> None:
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
