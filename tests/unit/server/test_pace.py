"""The time between two looks at the processes."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from graphkiln_backend.server.supervisor import POLL_S, WATCH_S, Pace


class Clock:
    """Processor time that passes when it is told; waiting takes none."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        self.waited: list[float] = []
        monkeypatch.setattr("time.thread_time", lambda: self.now)

    def wait(self, processes: Sequence[int], timeout_s: float) -> None:
        assert processes == [7]
        self.waited.append(timeout_s)


def test_looking_takes_a_twentieth_of_the_time_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    pace = Pace(clock.now)
    for looked_s, live in ((0.001, False), (0.01, False), (0.001, True), (0.04, True), (30, True)):
        clock.now += looked_s
        pace.wait(clock, [7], live=live)
    assert clock.waited == [POLL_S, pytest.approx(0.19), WATCH_S, pytest.approx(0.76), 1.0]
