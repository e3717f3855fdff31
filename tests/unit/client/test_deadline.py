"""Deadlines on a clock of our own."""

from __future__ import annotations

import pytest

from graphkiln_client.deadline import Deadline


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    return now


def test_what_is_left_shrinks_and_ends_at_zero(clock: list[float]) -> None:
    deadline = Deadline.after(2.5)
    assert (deadline.timeout_s, deadline.at, deadline.remaining_s) == (2.5, 102.5, 2.5)
    clock[0] += 2
    assert deadline.remaining_s == 0.5
    clock[0] += 1
    assert deadline.remaining_s == 0.0


@pytest.mark.usefixtures("clock")
def test_a_deadline_may_be_far_away() -> None:
    assert Deadline.after(float("inf")).remaining_s == float("inf")


def test_two_deadlines_do_not_share_their_time(clock: list[float]) -> None:
    first = Deadline.after(1)
    clock[0] += 0.75
    second = Deadline.after(1)
    assert (first.remaining_s, second.remaining_s) == (0.25, 1.0)
