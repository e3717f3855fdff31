"""A pause of this very process is noticed by the time between two calls."""

from __future__ import annotations

import pytest

from graphkiln_backend.server import watchdog as module
from graphkiln_backend.server.watchdog import SuspensionDetector


def test_a_pause_is_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter((100.0, 101.0, 105.9, 111.0, 112.0, 200.0, 200.5))
    monkeypatch.setattr(module.time, "monotonic", lambda: next(times))
    detector = SuspensionDetector()
    assert [detector.has_resumed() for _ in range(6)] == [False, False, True, False, True, False]
