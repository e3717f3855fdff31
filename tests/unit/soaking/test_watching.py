"""Readiness and memory of a service while a soak runs."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from soaking.watching import YOUNG_S, Lapse, Life, Readiness, Sample, by_role, grows, growth, leaking


@pytest.fixture
def watching() -> Iterator[Readiness]:
    service: Any = SimpleNamespace(ready_status=lambda: 200)
    with Readiness(service) as readiness:
        seen = [(10.0, 10.01, 503), (10.1, 10.2, None), (10.3, 10.4, 503), (20.0, 20.1, 400)]
        readiness._lapses = [Lapse(begun=begun, ended=ended, status=status) for begun, ended, status in seen]
        yield readiness


def test_the_longest_time_without_readiness(watching: Readiness) -> None:
    assert watching.longest_s(9, 30) == pytest.approx(0.4)
    assert watching.longest_s(15, 30) == pytest.approx(0.1)
    assert watching.longest_s(30, 40) == 0


def test_failures_outside_of_all_windows(watching: Readiness) -> None:
    assert [lapse.begun for lapse in watching.lapses_outside([(9.0, 11.0)])] == [20.0]
    assert watching.lapses_outside([(9.0, 11.0), (19.0, 21.0)]) == []


def test_a_lapse_names_models_and_the_log() -> None:
    service: Any = SimpleNamespace(
        ready_status=lambda: 400, unready_models=lambda: ("digits",), log_tail=lambda _: "first\ndigits: loading\n"
    )
    with Readiness(service) as readiness:
        lapse = readiness._examine(12.0, 12.1, 400)
    assert lapse.describe(since=10.0) == "2.0 s: 400, not ready: digits; the log: digits: loading"


def samples(*megabytes: float, instances: int = 5) -> list[Sample]:
    return [
        Sample(at=10.0 * number, instances=instances, mb=mb, regions_mb=9.0, files=11)
        for number, mb in enumerate(megabytes)
    ]


def life(*megabytes: float, role: str = "tritonserver", period_s: float = 30.0) -> Life:
    return Life(role, 100.0, [(100.0 + period_s * number, mb) for number, mb in enumerate(megabytes)])


def test_steady_growth_is_seen() -> None:
    figures = growth(samples(*[400 + 20 * number for number in range(15)]))
    assert grows(figures)
    assert figures["slope_mb_per_minute"] == 120


def test_growth_of_a_young_process_is_not_a_leak() -> None:
    grown = [50.0 + 10 * number for number in range(int(YOUNG_S / 30))]
    roles = by_role([life(*grown, *[200.0] * 8)])
    assert roles["tritonserver"]["slope_mb_per_minute"] == 0
    assert leaking(roles) == []


def test_growth_of_an_old_process_is_a_leak() -> None:
    roles = by_role([life(*range(100, 130)), life(*[50.0] * 30, role="supervisor")])
    assert leaking(roles) == ["tritonserver 2.0 MB/min"]
