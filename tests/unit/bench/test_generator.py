"""The load generator with work of known duration."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from graphkiln.bench.arrivals import poisson
from graphkiln.bench.generator import (
    Measurement,
    Recording,
    Timing,
    _rate,
    _Trace,
    in_turn,
    measure_throughput,
    record_closed_loop,
    record_open_loop,
)
from graphkiln_backend.graph.errors import Overloaded


def nothing() -> None:
    pass


def closed_loop(
    send: Callable[[], object], callers: int, seconds: float, *, warmup_s: float, at_start: Callable[[], None]
) -> Measurement:
    timing = Timing(seconds=seconds, warmup_s=warmup_s, at_start=at_start)
    return record_closed_loop(send, callers, timing).of_closed_loop()


def open_loop(
    send: Callable[[], object], rate: float, seconds: float, *, warmup_s: float, at_start: Callable[[], None]
) -> Measurement:
    timing = Timing(seconds=seconds, warmup_s=warmup_s, at_start=at_start)
    return record_open_loop(send, poisson(rate, warmup_s + seconds).tolist(), timing).of_open_loop()


def sleeping(seconds: float) -> None:
    time.sleep(seconds)


class TestClosedLoop:
    def test_errors_are_counted_by_type(self) -> None:
        turn = iter(range(10**9))

        def ask() -> None:
            time.sleep(0.002)
            if next(turn) % 2:
                raise Overloaded("busy")

        seen = closed_loop(ask, 1, 1.0, warmup_s=0.1, at_start=nothing)
        assert set(seen.errors) == {"Overloaded"}
        assert seen.errors["Overloaded"] == pytest.approx(seen.answered, abs=2)


class TestOpenLoop:
    def test_requests_due_before_the_end_are_sent(self) -> None:
        sent: list[None] = []
        arrivals = [0.5 - 0.002 + number * 1e-5 for number in range(200)]
        seen = record_open_loop(lambda: sent.append(None), arrivals, Timing(seconds=0.5, warmup_s=0.0)).of_open_loop()
        assert seen.unsent == 0
        assert len(sent) == 200

    @pytest.mark.parametrize("callers", [pytest.param(1, marks=pytest.mark.slow), 256])
    def test_open_loop_stall_counts_for_waiting_requests(self, callers: int) -> None:
        """During the stall, a closed loop sees one slow request, an open loop a hundred."""
        begun = time.perf_counter()
        lock = threading.Lock()

        def ask() -> None:
            with lock:
                if 0.5 < time.perf_counter() - begun < 0.6:
                    time.sleep(0.5)

        timing = Timing(seconds=1.5, warmup_s=0.1)
        seen = record_open_loop(ask, poisson(100, 1.6).tolist(), timing, callers).of_open_loop()
        assert seen.latency_ms["p90"] > 150, "a third of the requests waited 0.25 s on average"
        begun = time.perf_counter()
        closed = closed_loop(ask, 1, 1.5, warmup_s=0.1, at_start=nothing)
        assert closed.latency_ms["p99"] < 100

    def test_unsent_requests_count(self) -> None:
        seen = open_loop(lambda: sleeping(0.5), 2000, 1.0, warmup_s=0, at_start=nothing)
        assert seen.unsent > 100
        assert seen.latency_ms["p50"] > 250


class TestMeasurement:
    """Measurements from recordings."""

    def period(self, *traces: _Trace, begin: float = 100.0, end: float = 110.0, cpu_s: float = 5.0) -> Recording:
        return Recording(traces=list(traces), begin=begin, end=end, cpu_s=cpu_s)

    def test_rates_and_percentiles(self) -> None:
        latencies = np.linspace(0.01, 0.2, 200)
        done = 100 + 0.05 * np.arange(200)
        trace = _Trace(responses=list(zip(done - latencies, done, strict=True)))
        seen = self.period(trace).of_closed_loop()
        assert (seen.answered, seen.per_second, seen.seconds) == (200, 20.0, 10.0)
        assert seen.per_second_range == (20.0, 20.0), "each of the ten windows had as many"
        counted = latencies[done - latencies >= 100] * 1e3
        assert 190 < len(counted) < 200  # the first one was sent before
        for name, percent in (("p50", 50), ("p90", 90), ("p99", 99), ("p99.9", 99.9)):
            assert seen.latency_ms[name] == pytest.approx(np.percentile(counted, percent))
        assert seen.latency_ms["mean"] == pytest.approx(counted.mean())

    def test_closed_loop_counts_stall_at_end(self) -> None:
        quick = _Trace(responses=[(100 + number / 20, 100.04 + number / 20) for number in range(100)])
        hung = _Trace(responses=[(104.0, 164.0)], errors=[(105.0, 165.0, "DeadlineExceeded")])
        seen = self.period(quick, hung).of_closed_loop()
        assert (seen.answered, seen.errors) == (100, {"DeadlineExceeded": 1})
        assert seen.latency_ms["p50"] == pytest.approx(40)
        assert seen.latency_ms["p99.9"] > 50_000

    def test_confidence_interval(self) -> None:
        counts = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]
        moments = [100.5 + window for window, count in enumerate(counts) for _ in range(count)]
        trace = _Trace(responses=[(moment, moment) for moment in moments])
        seen = self.period(trace).of_closed_loop()
        margin = 2.262 * np.std(counts, ddof=1) / np.sqrt(10)
        assert seen.per_second_range == pytest.approx((5.5 - margin, 5.5 + margin))

    def test_requests_outside_measurement(self) -> None:
        trace = _Trace(
            responses=[(99.0, 99.9), (99.0, 100.0), (109.0, 109.9), (109.0, 110.0)],
            errors=[
                (98.0, 99.9, "Overloaded"),
                (98.0, 100.0, "ServerError"),
                (109.0, 109.9, "Overloaded"),
                (110.0, 110.0, "ServerError"),
            ],
        )
        seen = self.period(trace).of_closed_loop()
        assert (seen.answered, seen.due) == (2, 0)
        assert seen.errors == {"Overloaded": 1, "ServerError": 1}

    def test_open_loop_counts_late_failures(self) -> None:
        trace = _Trace(
            responses=[(101.0, 102.0), (108.0, 120.0), (99.0, 101.0)],
            errors=[(105.0, 165.0, "DeadlineExceeded"), (99.0, 104.0, "Overloaded")],
        )
        part = self.period(trace)
        part.unsent.append(109.0)
        seen = part.of_open_loop()
        assert seen.errors == {"DeadlineExceeded": 1}
        assert (seen.due, seen.answered, seen.unsent) == (4, 2, 1)

    def test_measurement_without_requests(self) -> None:
        seen = self.period(_Trace()).of_open_loop()
        assert (seen.latency_ms, seen.per_second, seen.unsent, seen.client_cores) == ({}, 0.0, 0, 0.5)

    def test_joined_recordings(self) -> None:
        one = self.period(_Trace(responses=[(101.0, 102.0)]), cpu_s=2.0)
        two = self.period(_Trace(responses=[(103.0, 105.0)]), begin=100.01, cpu_s=3.0)
        two.unsent.append(106.0)
        seen = Recording.joined([one, two]).of_open_loop()
        assert (seen.answered, seen.unsent, seen.client_cores, seen.processes) == (2, 1, 0.5, 2)
        assert seen.latency_ms["mean"] == pytest.approx((1000 + 2000 + 4000) / 3)

    def test_json_keys(self) -> None:
        """The field names are part of the `graphkiln bench --json` format."""
        seen = self.period(_Trace()).of_closed_loop()
        assert list(dataclasses.asdict(seen)) == [
            "seconds",
            "answered",
            "due",
            "unsent",
            "errors",
            "per_second",
            "per_second_range",
            "latency_ms",
            "client_cores",
            "processes",
        ]


def test_at_start_runs_between_warm_up_and_measurement() -> None:
    moments: list[float] = []
    begun = time.perf_counter()
    sent: list[float] = []

    def send() -> None:
        sent.append(time.perf_counter())
        time.sleep(0.005)

    closed_loop(send, 1, 0.2, warmup_s=0.15, at_start=lambda: moments.append(time.perf_counter()))
    assert moments[0] - begun == pytest.approx(0.15, abs=0.1)
    assert any(moment < moments[0] for moment in sent)
    assert any(moment > moments[0] for moment in sent)


def test_failing_at_start_stops_callers() -> None:
    def fail() -> None:
        raise Overloaded("no statistics")

    before = threading.active_count()
    with pytest.raises(Overloaded):
        closed_loop(lambda: sleeping(0.01), 2, 5.0, warmup_s=0.1, at_start=fail)
    assert threading.active_count() == before


def test_requests_take_turns_in_all_threads() -> None:
    sent: list[int] = []
    requests: list[Callable[[], object]] = [lambda number=number: sent.append(number) for number in range(3)]
    send = in_turn(requests)
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda _: send(), range(300)))
    assert Counter(sent) == {0: 100, 1: 100, 2: 100}


class TestThroughput:
    """Throughput of a function."""

    def test_one_caller(self) -> None:
        found = measure_throughput(lambda: sleeping(0.01), 1, 0.1)
        assert found.per_second == pytest.approx(len(found.latencies_ms) / found.seconds)
        assert min(found.latencies_ms) >= 10

    def test_filling_and_draining_the_pipeline_do_not_count(self) -> None:
        """A fake server that responds at every tick."""
        begun = time.perf_counter()
        waiting = iter([0.4] * 4)  # the first batch is late

        def ask() -> None:
            time.sleep(next(waiting, 0))
            time.sleep(0.05 - (time.perf_counter() - begun) % 0.05)

        assert measure_throughput(ask, 4, 0.92).per_second == pytest.approx(80, rel=0.3)

    def test_few_batches_count_as_a_whole(self) -> None:
        done = [1.2 * (number // 4 + 1) + number / 1e4 for number in range(20)]
        assert _rate(0.0, done, callers=6, deadline=3.0) == pytest.approx(20 / 6.0, rel=1e-3)
        assert _rate(0.0, done, callers=4, deadline=5.0) == pytest.approx(12 / 3.6, rel=0.01)

    def test_error_ends_the_measurement(self) -> None:
        def ask() -> None:
            raise Overloaded("no more")

        with pytest.raises(Overloaded, match="no more"):
            measure_throughput(ask, 3, 60)
