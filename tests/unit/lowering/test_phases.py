"""Where the seconds of a start go."""

from __future__ import annotations

import pytest

from graphkiln_backend.lowering.artifacts import Phases


class Clock:
    """Goes on by a second whenever somebody looks."""

    now_s = 0.0

    def monotonic(self) -> float:
        self.now_s += 1
        return self.now_s


def test_phases_are_added_up_in_the_order_of_their_first_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("graphkiln_backend.lowering.artifacts.time", Clock())
    phases = Phases()
    with phases.measure("session"):
        pass
    with pytest.raises(ZeroDivisionError), phases.measure("trial"):
        raise ZeroDivisionError
    with phases.measure("session"):
        pass
    assert list(phases.seconds.items()) == [("session", 2.0), ("trial", 1.0)]
