"""How readiness is watched."""

from __future__ import annotations

import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from soaking.service import Lapse, Readiness


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


def test_the_last_failure_and_what_was_said(watching: Readiness) -> None:
    assert watching.last_failure(9, 15) == 10.4
    assert watching.last_failure(11, 15) is None
    assert watching.statuses(9, 15) == {"503": 2, "no answer": 1}


def test_failures_outside_of_all_windows(watching: Readiness) -> None:
    assert [lapse.begun for lapse in watching.lapses_outside([(9.0, 11.0)])] == [20.0]
    assert watching.lapses_outside([(9.0, 11.0), (19.0, 21.0)]) == []


def test_a_service_that_is_not_ready_is_noted() -> None:
    service: Any = SimpleNamespace(ready_status=lambda: 503, log_tail=lambda _: "")
    begun = time.monotonic()
    with Readiness(service) as readiness:
        while readiness.last_failure(begun, time.monotonic()) is None:
            assert time.monotonic() - begun < 30
            time.sleep(0.02)


def test_a_lapse_says_which_model_and_what_the_log_said() -> None:
    service: Any = SimpleNamespace(
        ready_status=lambda: 400, unready_models=lambda: ("digits",), log_tail=lambda _: "first\ndigits: loading\n"
    )
    with Readiness(service) as readiness:
        lapse = readiness._examine(12.0, 12.1, 400)
    assert lapse.describe(since=10.0) == "2.0 s: 400, not ready: digits; the log said: digits: loading"
