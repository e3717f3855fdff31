"""Set-ups take turns; medians of the measured rounds."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import measurement
import pytest
from measurement import measure, show_progress

from graphkiln.bench.generator import Throughput


class FakeLoad:
    """Load with given rates, one after the other."""

    def __init__(self, rates: list[float]) -> None:
        self.rates = itertools.cycle(rates)
        self.calls: list[tuple[int, float]] = []

    def __call__(self, call: Callable[[], object], callers: int, seconds: float) -> Throughput:
        call()
        self.calls.append((callers, seconds))
        rate = next(self.rates)
        return Throughput(per_second=rate, latencies_ms=(1e3 / rate,), seconds=seconds)


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> FakeLoad:
    fake = FakeLoad([1000.0, 1000.0, 10.0, 20.0, 30.0, 40.0, 20.0, 60.0])
    monkeypatch.setattr(measurement, "measure_throughput", fake)
    return fake


@pytest.fixture
def requests() -> list[str]:
    """Names of the set-ups in the order of their requests."""
    return []


@pytest.fixture
def set_ups(requests: list[str]) -> dict[str, Callable[[], object]]:
    return {name: partial(requests.append, name) for name in ("one", "two")}


@pytest.mark.usefixtures("load")
def test_set_ups_take_turns(set_ups: dict[str, Callable[[], object]], requests: list[str]) -> None:
    measure(set_ups, 4, 3, 0.5)
    assert requests == ["one", "two"] * 4


def test_the_first_round_is_a_short_warm_up(load: FakeLoad, set_ups: Any) -> None:
    found = measure(set_ups, 4, 3, 5.0)
    assert load.calls == [(4, 1.0)] * 2 + [(4, 5.0)] * 6
    assert (found["one"].per_second, found["two"].per_second) == (20, 40)  # of 10, 30, 20 and of 20, 40, 60
    assert found["one"].p50_ms == pytest.approx(50)


def test_a_failed_request_ends_the_measurement(set_ups: Any) -> None:
    def fail() -> None:
        raise ConnectionError("gone")

    with pytest.raises(ConnectionError, match="gone"):
        measure({**set_ups, "broken": fail}, 2, 1, 0.01)


def test_progress_replaces_its_line(capsys: pytest.CaptureFixture[str]) -> None:
    show_progress("round 1")
    show_progress("")
    assert capsys.readouterr() == ("", "\r\033[Kround 1\r\033[K")
