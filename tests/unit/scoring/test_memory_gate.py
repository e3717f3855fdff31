"""What is held together stays within the limit, and whatever is too large for it is held alone."""

from __future__ import annotations

import threading

import pytest

from graphkiln_backend.scoring.reading import MemoryGate


def test_holds_what_fits_side_by_side() -> None:
    gate = MemoryGate(10)
    with gate.hold(4), gate.hold(6):
        assert gate.held_bytes == 10
    assert gate.held_bytes == 0


def test_waits_for_room() -> None:
    gate = MemoryGate(10)
    entered = threading.Event()

    def enter() -> None:
        with gate.hold(5):
            entered.set()

    waiting = threading.Thread(target=enter)
    with gate.hold(6):
        waiting.start()
        assert not entered.wait(0.05)
    assert entered.wait(10)
    waiting.join()


def test_what_is_larger_than_the_limit_is_held_alone() -> None:
    gate = MemoryGate(10)
    entered = threading.Event()

    def enter() -> None:
        with gate.hold(1):
            entered.set()

    small = threading.Thread(target=enter)
    with gate.hold(1000):
        assert gate.held_bytes == 1000
        small.start()
        assert not entered.wait(0.05)
    assert entered.wait(10)
    small.join()


def test_an_error_frees_what_was_held() -> None:
    gate = MemoryGate(10)
    with pytest.raises(ValueError, match="any"), gate.hold(10):
        raise ValueError("any")
    assert gate.held_bytes == 0


def test_what_is_urgent_is_admitted_in_any_case() -> None:
    gate = MemoryGate(10)
    urgent, entered = threading.Event(), threading.Event()

    def enter() -> None:
        gate.acquire(8, urgent.is_set)
        entered.set()

    waiting = threading.Thread(target=enter)
    with gate.hold(8):
        waiting.start()
        assert not entered.wait(0.05)
        urgent.set()
        gate.release(0)
        assert entered.wait(10)
        assert gate.held_bytes == 16
    waiting.join()
