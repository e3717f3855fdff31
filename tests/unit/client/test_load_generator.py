"""The load generator against work of known length."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest

from graphkiln_backend.graph.errors import Overloaded
from graphkiln_client.load_generator import closed_loop, open_loop


def nothing() -> None:
    pass


def sleeping(seconds: float) -> None:
    time.sleep(seconds)


class TestClosedLoop:
    def test_counts_what_was_answered(self) -> None:
        seen = closed_loop(lambda: sleeping(0.02), 4, 2.0, warmup_s=0.1, at_start=nothing)
        assert seen.latency_ms["p50"] == pytest.approx(20, rel=0.3)
        # Little's law: callers = rate x latency.
        assert seen.per_second * seen.latency_ms["mean"] / 1e3 == pytest.approx(4, rel=0.1)
        low, high = seen.per_second_range
        assert low <= seen.per_second <= high
        assert seen.answered == pytest.approx(seen.per_second * seen.seconds)
        assert (seen.errors, seen.unsent) == ({}, 0)

    def test_no_more_callers_than_asked(self) -> None:
        most, inside, lock = 0, 0, threading.Lock()

        def ask() -> None:
            nonlocal most, inside
            with lock:
                inside += 1
                most = max(most, inside)
            time.sleep(0.005)
            with lock:
                inside -= 1

        closed_loop(ask, 3, 0.5, warmup_s=0, at_start=nothing)
        assert most == 3

    def test_the_warm_up_does_not_count(self) -> None:
        begun = time.perf_counter()
        seen = closed_loop(
            lambda: sleeping(0.2 if time.perf_counter() - begun < 0.5 else 0.01), 1, 1.0, warmup_s=0.8, at_start=nothing
        )
        assert seen.latency_ms["p99.9"] < 100

    def test_errors_are_counted_by_kind_and_have_no_latency(self) -> None:
        turn = iter(range(10**9))

        def ask() -> None:
            time.sleep(0.002)
            if next(turn) % 2:
                raise Overloaded("busy")

        seen = closed_loop(ask, 1, 1.0, warmup_s=0.1, at_start=nothing)
        assert set(seen.errors) == {"Overloaded"}
        assert seen.errors["Overloaded"] == pytest.approx(seen.answered, abs=2)

    def test_nothing_answered(self) -> None:
        def ask() -> None:
            time.sleep(0.01)
            raise Overloaded("busy")

        seen = closed_loop(ask, 1, 0.5, warmup_s=0, at_start=nothing)
        assert (seen.answered, seen.per_second, seen.latency_ms) == (0, 0, {})


class TestOpenLoop:
    def test_requests_come_at_the_rate(self) -> None:
        seen = open_loop(lambda: sleeping(0.001), 200, 2.0, warmup_s=0.2, at_start=nothing)
        assert seen.per_second == pytest.approx(200, rel=0.25)
        assert seen.unsent == 0

    @pytest.mark.parametrize("callers", [1, 256])
    def test_a_stall_is_charged_to_all_who_waited(self, callers: int, monkeypatch: pytest.MonkeyPatch) -> None:
        """One second in which nothing is answered: a closed loop sees one slow request, an open one a hundred."""
        monkeypatch.setattr("graphkiln_client.load_generator._MAX_CALLERS", callers)
        begun = time.perf_counter()
        lock = threading.Lock()

        def ask() -> None:
            with lock:
                if 1.0 < time.perf_counter() - begun < 1.1:
                    time.sleep(1.0)

        seen = open_loop(ask, 100, 3.0, warmup_s=0.1, at_start=nothing)
        assert seen.latency_ms["p90"] > 300, "a third of the requests came during the stall and waited 0.5 s on average"
        begun = time.perf_counter()
        closed = closed_loop(ask, 1, 3.0, warmup_s=0.1, at_start=nothing)
        assert closed.latency_ms["p99"] < 100

    def test_what_could_not_be_sent_is_told_and_charged(self) -> None:
        seen = open_loop(lambda: sleeping(0.5), 2000, 1.0, warmup_s=0, at_start=nothing)
        assert seen.unsent > 500
        assert seen.latency_ms["p50"] > 250

    def test_arrivals_are_random_but_the_same_every_time(self) -> None:
        from graphkiln_client.load_generator import _arrivals

        first, second = np.diff(_arrivals(100, 50)), np.diff(_arrivals(100, 50))
        np.testing.assert_allclose(first, second, atol=1e-6)
        assert first.mean() == pytest.approx(0.01, rel=0.1)
        assert first.std() == pytest.approx(0.01, rel=0.1), "an exponential distribution"


def test_a_failure_beside_the_load_stops_the_callers() -> None:
    def fail() -> None:
        raise Overloaded("no statistics")

    before = threading.active_count()
    with pytest.raises(Overloaded):
        closed_loop(lambda: sleeping(0.01), 2, 5.0, warmup_s=0.1, at_start=fail)
    assert threading.active_count() == before
