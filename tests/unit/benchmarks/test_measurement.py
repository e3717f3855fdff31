"""Set-ups take turns; medians of the rounds that count."""

from __future__ import annotations

import itertools

import measurement
import pytest
from measurement import SetUp, measure, show_progress

from graphkiln.story.worker import Throughput


class FakeLoad:
    """Stands in for real load: rates that a test chooses, one after the other."""

    def __init__(self, rates: list[float]) -> None:
        self.rates = itertools.cycle(rates)
        self.calls: list[tuple[int, float]] = []

    def __call__(self, predict: object, callers: int, jpegs: object, seconds: float) -> Throughput:
        assert callable(predict)
        assert jpegs == (b"",)
        predict(b"")
        self.calls.append((callers, seconds))
        rate = next(self.rates)
        return Throughput(per_second=rate, latencies_ms=(1e3 / rate,), seconds=seconds, images=1)


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
def set_ups(requests: list[str]) -> list[SetUp]:
    return [
        SetUp(name="one", concurrency=1, request=lambda: requests.append("one")),
        SetUp(name="two", concurrency=4, request=lambda: requests.append("two")),
    ]


@pytest.mark.usefixtures("load")
def test_set_ups_take_turns(set_ups: list[SetUp], requests: list[str]) -> None:
    measure(set_ups, 3, 0.5)
    assert requests == ["one", "two"] * 4


def test_the_first_round_is_a_short_warm_up_that_does_not_count(load: FakeLoad, set_ups: list[SetUp]) -> None:
    found = measure(set_ups, 3, 5.0)
    assert load.calls == [(1, 1.0), (4, 1.0), *[(1, 5.0), (4, 5.0)] * 3]
    assert (found["one"].per_second, found["two"].per_second) == (20, 40)  # of 10, 30, 20 and of 20, 40, 60


@pytest.mark.usefixtures("load")
def test_latencies_are_of_all_rounds(set_ups: list[SetUp]) -> None:
    found = measure(set_ups, 3, 0.1)["one"]
    assert found.p50_ms == pytest.approx(50)
    assert found.p99_ms == pytest.approx(99, abs=1)


def test_a_request_that_fails_ends_it(set_ups: list[SetUp]) -> None:
    def fail() -> None:
        raise ConnectionError("gone")

    broken = SetUp(name="broken", concurrency=2, request=fail)
    with pytest.raises(ConnectionError, match="gone"):
        measure([*set_ups, broken], 1, 0.01)


def test_progress_replaces_its_line(capsys: pytest.CaptureFixture[str]) -> None:
    show_progress("round 1")
    show_progress("")
    assert capsys.readouterr() == ("", "\r\033[Kround 1\r\033[K")
