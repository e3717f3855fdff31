"""Driving coroutines without an event loop."""

from __future__ import annotations

import asyncio

import pytest

from graphkiln_client.client import run


async def add(left: int, right: int) -> int:
    return left + right


def test_the_result_is_returned() -> None:
    async def outer() -> int:
        return await add(1, 2) + await add(3, 4)

    assert run(outer()) == 10


def test_a_coroutine_that_waits_is_refused_and_cleaned_up() -> None:
    ended = []

    async def wait() -> None:
        try:
            await asyncio.sleep(0)
        finally:
            ended.append(True)

    with pytest.raises(RuntimeError, match="was suspended"):
        run(wait())
    assert ended == [True]


def test_it_works_inside_a_running_loop() -> None:
    """A notebook has a loop of its own; the synchronous client needs none and disturbs none."""

    async def cell() -> int:
        return run(add(1, 2))

    assert asyncio.run(cell()) == 3
