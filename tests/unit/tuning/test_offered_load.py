"""When requests of a trial come, and what becomes of each."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from graphkiln.tuning.measure import Arriving, latencies_of, plan_load, summarize
from graphkiln.tuning.trials import ClosedLoop, OpenLoop
from graphkiln_backend.graph.errors import InvalidInput
from graphkiln_client.load_generator import Recording, _Trace


def recording(
    responses: list[tuple[float, float]], errors: Sequence[tuple[float, float]] = (), unsent: Sequence[float] = ()
) -> Recording:
    trace = _Trace(responses=responses, errors=[(*moments, "ServerError") for moments in errors])
    return Recording(traces=[trace], begin=10.0, end=20.0, cpu_s=1.0, unsent=list(unsent))


class TestMoments:
    def test_a_rate_is_kept_and_a_seed_moves_them(self) -> None:
        arriving = Arriving()
        moments = arriving.moments(200, 50, 1)
        assert len(moments) == pytest.approx(10_000, rel=0.05)
        assert moments[0] != arriving.moments(200, 50, 2)[0]
        np.testing.assert_array_equal(moments, arriving.moments(200, 50, 1))

    def test_bursts(self) -> None:
        moments = Arriving(burst=4).moments(100, 50, 0)
        assert {size % 4 for size in np.unique(moments, return_counts=True)[1]} == {0}

    def test_a_trace_is_stretched_to_the_rate(self) -> None:
        trace = np.array([0, 1, 1.5, 4.0])
        arriving = Arriving(trace=trace)
        moments = arriving.moments(30, 100, 3)
        assert len(moments) == pytest.approx(3000, rel=0.01)
        gaps = np.unique(np.diff(moments).round(9))
        np.testing.assert_allclose(gaps, np.array([0.5, 1.0, 2.5]) * 0.75 / 30)
        assert moments[0] != arriving.moments(30, 100, 4)[0]

    def test_options_that_contradict_each_other(self, tmp_path: Path) -> None:
        trace = tmp_path / "trace"
        trace.write_text("0\n1\n")
        with pytest.raises(InvalidInput, match="both say when"):
            Arriving.of(4, trace)
        trace.write_text("5\n5\n")
        with pytest.raises(InvalidInput, match="all requests come at once"):
            Arriving.of(None, trace)

    def test_it_says_in_words_what_it_is(self) -> None:
        assert str(Arriving()) == "Poisson arrivals"
        assert str(Arriving(burst=8)) == "bursts of 8 at random moments"
        assert "recorded" in str(Arriving(trace=np.array([0.0, 1.0])))


class TestLoad:
    def test_a_rate_is_an_open_loop(self) -> None:
        load = plan_load(OpenLoop(100), Arriving(), seconds=4, warmup_s=1, seed=0)
        assert load.arrivals is not None
        assert len(load.arrivals) == pytest.approx(500, rel=0.2)
        assert (load.seconds, load.warmup_s) == (4, 1)

    def test_callers_are_a_closed_one(self) -> None:
        load = plan_load(ClosedLoop(3), Arriving(), seconds=4, warmup_s=1, seed=0)
        assert (load.callers, load.arrivals) == (3, None)


class TestLatencies:
    def test_they_count_from_when_a_request_was_due(self) -> None:
        found = recording([(11.0, 11.5), (9.9, 10.5), (10.5, 25.0)])
        assert latencies_of(found, is_open=True).tolist() == [14.5, 0.5]

    def test_a_closed_loop_counts_what_was_answered_in_time(self) -> None:
        found = recording([(11.0, 11.5), (9.9, 10.5), (10.5, 25.0)])
        assert latencies_of(found, is_open=False).tolist() == pytest.approx([0.6, 0.5])

    def test_what_failed_or_was_never_sent_took_for_ever_in_its_place(self) -> None:
        failed = [(12.0, 12.5), (9.0, 14.0), (18.0, 40.0)]  # the second was due before the beginning, the third hung
        found = recording([(11.0, 11.5), (19.0, 19.25)], errors=failed, unsent=[13.0])
        assert latencies_of(found, is_open=True).tolist() == [0.5, np.inf, np.inf, np.inf, 0.25]
        assert latencies_of(found, is_open=False).tolist() == [0.5, np.inf, np.inf, np.inf, 0.25, np.inf]

    def test_a_summary_has_both(self) -> None:
        found = recording([(10 + 0.1 * number, 10.01 + 0.1 * number) for number in range(100)])
        latency, throughput = summarize(found, is_open=True)
        assert latency.count == 100
        assert latency.p50_s == pytest.approx(0.01)
        assert throughput.value == pytest.approx(10)

    def test_nothing_at_all_is_endless(self) -> None:
        latency, throughput = summarize(recording([]), is_open=True)
        assert latency.p99.value == np.inf
        assert throughput.value == 0
