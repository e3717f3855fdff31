"""Confirmation of the choice with other arrivals, and the latency curve."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest
import tuned
from simulated_server import SimulatedServer, true_rate
from tuned import exact

from graphkiln.tuning.candidate import Candidate
from graphkiln.tuning.contest import CandidateScore
from graphkiln.tuning.journal import Journal, RecordedTrials
from graphkiln.tuning.result import knee
from graphkiln.tuning.search import confirm, sweep
from graphkiln.tuning.space import Space
from graphkiln.tuning.target import Objective, Target
from graphkiln.tuning.trials import Failed, LoadShape, Measured, OpenLoop

TARGET = Target(p99_s=0.08)


@pytest.fixture
def server() -> SimulatedServer:
    return SimulatedServer(cores=2, noise=0.02)


def scored(space: Space, rate: float) -> CandidateScore:
    return CandidateScore(candidate=space.default, score=exact(rate))


Within = Callable[[SimulatedServer, float], RecordedTrials]


@pytest.fixture
def recorded(tmp_path: Path) -> Iterator[Within]:
    """Create trials on a simulated server within a budget."""
    with ExitStack() as stack:

        def within(server: SimulatedServer, budget_s: float) -> RecordedTrials:
            journal = stack.enter_context(Journal(tmp_path / f"{server.now_s}", {}))
            trials = RecordedTrials(server, journal, server.clock)
            trials.budget.total_s = budget_s
            return trials

        yield within


def test_missed_rate_is_lowered(server: SimulatedServer, space: Space, recorded: Within) -> None:
    true = true_rate(server, space.default, TARGET.p99_s)
    promise, _ = confirm(recorded(server, 1000.0), scored(space, 1.3 * true), TARGET, 1.0)
    assert promise is not None
    assert isinstance(promise.load, OpenLoop)
    assert 0.5 * true <= promise.load.rate <= true * 1.03


def test_curve_rises_and_respects_the_budget(server: SimulatedServer, space: Space, recorded: Within) -> None:
    rate = 0.9 * true_rate(server, space.default, TARGET.p99_s)
    promise, _ = confirm(recorded(server, 1000.0), scored(space, rate), TARGET, 1.0)
    assert promise is not None
    curve, failure = sweep(recorded(server, 1000.0), space.default, promise, 20.0)
    assert failure == ""
    rates = [each.load.rate for each in curve if isinstance(each.load, OpenLoop)]
    assert len(rates) == 6
    assert rates == sorted(rates)
    assert curve[-1].measured.latency.p99.value > curve[0].measured.latency.p99.value
    assert knee(curve) in (None, *rates)
    assert len(sweep(recorded(server, 50.0), space.default, promise, 20.0)[0]) == 2
    assert isinstance(curve[0].measured, Measured)


def test_last_affordable_measurement_promises_less(server: SimulatedServer, space: Space, recorded: Within) -> None:
    rate = 0.9 * true_rate(server, space.default, TARGET.p99_s)
    trials = recorded(server, 1100 / rate + 8)
    promise, reason = confirm(trials, scored(space, rate), TARGET, 1.0)
    assert reason == ""
    assert promise is not None
    assert promise.load == OpenLoop(float(f"{0.75 * rate:.4g}"))
    assert trials.count == 1
    assert promise.measured.latency.count >= 700


class Growing(SimulatedServer):
    """A server with a growing queue and short latencies so far."""

    def measure(self, candidate: Candidate, load: LoadShape, seconds: float, seed: int) -> Measured | Failed:
        del candidate, load, seconds, seed
        return tuned.measured(60.0, 0.02)


def test_growing_queue_is_not_promised(space: Space, recorded: Within) -> None:
    promise, reason = confirm(recorded(Growing(cores=2), 1000.0), scored(space, 100.0), TARGET, 1.0)
    assert promise is None
    assert "the queue grows" in reason


AT_RATE = Target(p99_s=0.08, rate=40.0, objective=Objective.LATENCY)


@pytest.mark.parametrize("stalls_by_itself", [False, True])
def test_given_load_is_measured_twice(
    server: SimulatedServer, space: Space, recorded: Within, stalls_by_itself: bool
) -> None:
    """One failure may be a stall of the machine; stalls of the candidate show again."""
    server.stalls = [(3.0, 2.0)]
    if stalls_by_itself:
        server.stalls, server.pauses = [], lambda _: (4.0, 0.5)
    promise, reason = confirm(recorded(server, 300.0), scored(space, -1.0), AT_RATE, 1.0)
    assert "when measured again" in reason
    assert (promise is None) is stalls_by_itself
    assert {call[1] for call in server.measured} == {OpenLoop(40.0)}, "a given rate is not lowered"
    first_s, second_s = (call[2] for call in server.measured)
    assert second_s == pytest.approx(2 * first_s)


def test_failed_requests_have_no_time(
    server: SimulatedServer, space: Space, recorded: Within, monkeypatch: pytest.MonkeyPatch
) -> None:
    good = tuned.measured(40, 0.02)
    failed = replace(good, latency=replace(good.latency, p99=exact(math.inf), p99_wide_s=math.inf))
    monkeypatch.setattr(RecordedTrials, "measure", lambda *_: failed)
    _, reason = confirm(recorded(server, 1000.0), scored(space, 100.0), TARGET, 1.0)
    assert reason == "more than 1 in 100 of 1000 requests failed or were not sent in time when measured again"
