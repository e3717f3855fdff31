"""Where the time went, from two readings of the statistics."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from shown_server import Shown

from graphkiln.page import timing
from graphkiln.page.timing import Spent, read_spent, timed


def spent_in(shown: Shown, *counts: int) -> dict[str, Any]:
    shown.answer_in_turn(*counts)

    async def ask() -> dict[str, Any]:
        model = shown.server().model("m", "1")
        before = await read_spent(model)
        return await before.until_now(model)

    return asyncio.run(ask())


def test_of_one_request(shown: Shown) -> None:
    assert spent_in(shown, 7, 8) == {"queue_ms": 2, "compute_ms": 5, "requests": 1}


def test_statistics_that_come_late_are_read_again(shown: Shown) -> None:
    assert spent_in(shown, 7, 7, 7, 8)["requests"] == 1


def test_of_several_the_mean(shown: Shown) -> None:
    assert spent_in(shown, 7, 10) == {"queue_ms": 2, "compute_ms": 5, "requests": 3}


def test_a_server_that_never_counts(shown: Shown, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "_READINGS", 2)
    assert spent_in(shown, 7) == {}


def test_statistics_without_a_phase() -> None:
    assert Spent.parse({}) == Spent(0, dict.fromkeys(("queue", "compute_input", "compute_infer", "compute_output"), 0))


def test_a_request_is_timed_whole(shown: Shown) -> None:
    shown.answer_in_turn(7, 8)

    async def ask() -> tuple[str, dict[str, Any]]:
        async def answer() -> str:
            return "it"

        return await timed(shown.server().model("m", "1"), answer)

    answer, times = asyncio.run(ask())
    assert answer == "it"
    assert times["total_ms"] >= 0
    assert (times["queue_ms"], times["requests"]) == (2, 1)
