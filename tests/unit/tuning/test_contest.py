"""The bracket of rates: what a measurement passes, fails or leaves open."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
from simulated_server import SimulatedServer, true_rate

from graphkiln.tuning import contest as contest_module
from graphkiln.tuning.candidate import Candidate
from graphkiln.tuning.contest import RESOLUTION, RateContest
from graphkiln.tuning.drift import Reference
from graphkiln.tuning.result import CandidateScore, Point
from graphkiln.tuning.space import Space
from graphkiln.tuning.statistics import Interval, Latency
from graphkiln.tuning.target import Target
from graphkiln.tuning.trials import ClosedLoop, Failed, LoadShape, Measured, OpenLoop

TARGET = Target(p99_s=0.08)


def point(load: LoadShape, p99: Interval, answered: float | None = None) -> Point:
    rate = load.rate if isinstance(load, OpenLoop) else 100.0
    latency = Latency(count=int(rate * 10), mean_s=0.01, p50_s=0.01, p90_s=0.02, p99=p99, p999_s=0.2)
    throughput = Interval.exact(rate if answered is None else answered)
    return Point(load=load, measured=Measured(latency=latency, throughput=throughput, seconds=10.0))


def contest_of(reference: Reference) -> RateContest:
    return RateContest(reference, TARGET, 2.0, 60.0)


@pytest.fixture
def server() -> SimulatedServer:
    return SimulatedServer(cores=2)


@pytest.fixture
def contest(reference_of: Callable[[SimulatedServer], Reference], server: SimulatedServer) -> RateContest:
    return contest_of(reference_of(server))


def scored(space: Space, *points: Point) -> CandidateScore:
    return CandidateScore(candidate=space.default, score=Interval(0, 0, 200), rate_bound=200, points=points)


def test_passes_fails_and_what_cannot_be(contest: RateContest, space: Space) -> None:
    points = (
        point(ClosedLoop(8), Interval(0.05, 0.04, 0.06)),
        point(OpenLoop(50), Interval(0.05, 0.04, math.inf)),
        point(OpenLoop(90), Interval(0.09, 0.07, math.inf)),  # missed, by its estimate alone
        point(OpenLoop(98), Interval(0.12, 0.10, math.inf)),
    )
    bracket = contest.bracket(scored(space, *points))
    assert (bracket.passed, bracket.failed, bracket.refuted) == (50, 90, 98)
    assert bracket.capacity == pytest.approx(105)
    assert bracket.next_rate == pytest.approx(math.sqrt(50 * 90))


def test_a_rate_that_is_not_answered_is_refuted_however_fast_the_rest(contest: RateContest, space: Space) -> None:
    bracket = contest.bracket(scored(space, point(OpenLoop(90), Interval(0.01, 0.01, 0.02), answered=70)))
    assert bracket.refuted == 90


def test_of_two_that_contradict_each_other_the_later_one_counts(contest: RateContest, space: Space) -> None:
    passes, fails = point(OpenLoop(60), Interval.exact(0.05)), point(OpenLoop(50), Interval.exact(0.09))
    assert contest.bracket(scored(space, passes, fails)).passed == 0
    assert contest.bracket(scored(space, fails, passes)).failed == 200


def test_settling_finds_the_rate(contest: RateContest, server: SimulatedServer, space: Space) -> None:
    entered = contest.enter(space.default, 1000.0)
    settled = contest.settle(entered, -math.inf)
    assert settled.score.lower == pytest.approx(true_rate(server, space.default, TARGET.p99_s), rel=0.15)
    assert contest.bracket(settled).is_narrow


def test_without_a_bound_the_capacity_is_measured(contest: RateContest, space: Space) -> None:
    assert contest.settle(contest.enter(space.default, math.inf), -math.inf).score.lower > 0


def test_one_that_fails_at_the_rate_of_another_is_asked_no_other_rate(
    contest: RateContest, server: SimulatedServer, space: Space
) -> None:
    settled = contest.settle(contest.enter(space.default, 1000.0), 3 * true_rate(server, space.default, TARGET.p99_s))
    assert len({point.load for point in settled.points}) == 1
    assert settled.score.lower == 0


def test_one_that_ties_is_told_from_one_that_does_not(contest: RateContest, space: Space) -> None:
    best, near, far = (
        CandidateScore(candidate=space.default, score=Interval(rate, rate, 300)) for rate in (100, 100 / RESOLUTION, 90)
    )
    assert contest.is_tie(near, best)
    assert not contest.is_tie(far, best)


def test_a_failure_ends_the_contest(contest: RateContest, server: SimulatedServer, space: Space) -> None:
    server.fault = lambda _: "hang"
    settled = contest.settle(contest.enter(space.default, 1000.0), -math.inf)
    assert settled.lost == "it did not answer within 20 s"
    assert len(server.measured) == 1


def test_a_target_that_no_rate_meets_ends_at_a_fortieth_of_the_capacity(
    reference_of: Callable[[SimulatedServer], Reference], server: SimulatedServer, space: Space
) -> None:
    contest = RateContest(reference_of(server), Target(p99_s=0.001), 2.0, 60.0)
    settled = contest.settle(contest.enter(space.default, 1000.0), -math.inf)
    assert settled.score.lower == 0
    assert len({point.load for point in settled.points}) <= 8
    assert contest.describe(settled.score.lower) == "no rate"
    assert contest.describe(12.34) == "12.3 requests per second"


class Stalling(SimulatedServer):
    """A machine that stands still for a moment, once, while a rate is asked for that is far below what is reached."""

    def measure(self, candidate: Candidate, load: LoadShape, seconds: float, seed: int) -> Measured | Failed:
        found = super().measure(candidate, load, seconds, seed)
        stalls = isinstance(load, OpenLoop) and load.rate < 50 and not self.has_stalled
        if not stalls or isinstance(found, Failed):
            return found
        self.has_stalled = True
        return replace(found, latency=replace(found.latency, p99=Interval(0.4, 0.3, math.inf)))

    has_stalled = False


@pytest.mark.parametrize(("idle", "shares"), [(0.6, (0.9, 1.1)), (0.0, (0.0, 0.8))])
def test_a_stall_of_the_machine_does_not_cut_off_the_rates_above(
    reference_of: Callable[[SimulatedServer], Reference],
    space: Space,
    monkeypatch: pytest.MonkeyPatch,
    idle: float,
    shares: tuple[float, float],
) -> None:
    """Without the second question, the negative control, it does."""
    monkeypatch.setattr(contest_module, "_IDLE", idle)
    server = Stalling(cores=2)
    contest = RateContest(reference_of(server), Target(p99_s=0.025), 2.0, 60.0)
    settled = contest.settle(contest.enter(space.default, math.inf), -math.inf)
    true = true_rate(SimulatedServer(cores=2), space.default, 0.025)
    assert server.has_stalled
    assert shares[0] * true <= settled.score.lower <= shares[1] * true


def test_a_p99_that_no_rate_lowers_ends_the_bracket(
    contest: RateContest, server: SimulatedServer, space: Space
) -> None:
    """A candidate that stands still by itself does so at any rate; at two of them it is asked twice."""
    server.pauses = lambda _: (1.0, 0.3)
    settled = contest.settle(contest.enter(space.default, math.inf), -math.inf)
    assert settled.score.lower == 0
    asked = [call for call in server.measured if isinstance(call[1], OpenLoop)]
    assert len({call[1] for call in asked}) == 3
    again = [call for call in asked if call[3] == contest_module._AGAIN]
    assert 1 <= len({call[1] for call in again}) <= contest_module._EXCUSED
