"""Contests: brackets of rates, and comparisons under a given load."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, cast

import pytest
import tuned
from simulated_server import SimulatedServer, true_rate
from tuned import exact

from graphkiln.tuning import contest as contest_module
from graphkiln.tuning.candidate import INSTANCES, Candidate
from graphkiln.tuning.contest import CandidateScore, LoadContest, Point, RateContest
from graphkiln.tuning.drift import Reference
from graphkiln.tuning.measure import Arriving
from graphkiln.tuning.space import Space
from graphkiln.tuning.statistics import Interval, Latency
from graphkiln.tuning.target import Objective, Target
from graphkiln.tuning.trials import ClosedLoop, Failed, LoadShape, Measured, OpenLoop

TARGET = Target(p99_s=0.08)


def point(load: LoadShape, p99: Interval, answered: float | None = None) -> Point:
    rate = load.rate if isinstance(load, OpenLoop) else 100.0
    latency = Latency(count=int(rate * 10), mean_s=0.01, p50_s=0.01, p99=p99)
    throughput = exact(rate if answered is None else answered)
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


def test_bracket(contest: RateContest, space: Space) -> None:
    points = (
        point(ClosedLoop(8), Interval(0.05, 0.04, 0.06)),
        point(OpenLoop(50), Interval(0.05, 0.04, math.inf)),
        point(OpenLoop(90), Interval(0.09, 0.07, math.inf)),  # failed by its estimate, but not significantly
        point(OpenLoop(98), Interval(0.12, 0.10, math.inf)),
    )
    bracket = contest.bracket(scored(space, *points))
    assert (bracket.passed, bracket.failed, bracket.refuted) == (50, 90, 98)
    assert bracket.capacity == pytest.approx(105)
    assert bracket.next_rate == pytest.approx(math.sqrt(50 * 90))


def test_settle_finds_the_rate(contest: RateContest, server: SimulatedServer, space: Space) -> None:
    entered = contest.enter(space.default, 1000.0)
    settled = contest.settle(entered, -math.inf)
    assert settled.score.lower == pytest.approx(true_rate(server, space.default, TARGET.p99_s), rel=0.15)
    assert contest.bracket(settled).is_narrow


def test_unreachable_target_ends_at_the_minimum_rate(
    reference_of: Callable[[SimulatedServer], Reference], server: SimulatedServer, space: Space
) -> None:
    contest = RateContest(reference_of(server), Target(p99_s=0.001), 2.0, 60.0)
    settled = contest.settle(contest.enter(space.default, 1000.0), -math.inf)
    assert settled.score.lower == 0
    assert len({point.load for point in settled.points}) <= 8
    assert contest.describe(settled.score.lower) == "no rate"
    assert contest.describe(12.34) == "12.3 requests per second"


class Stalling(SimulatedServer):
    """A machine that stalls once, during a measurement at a low rate."""

    def measure(self, candidate: Candidate, load: LoadShape, seconds: float, seed: int) -> Measured | Failed:
        found = super().measure(candidate, load, seconds, seed)
        stalls = isinstance(load, OpenLoop) and load.rate < 50 and not self.has_stalled
        if not stalls or isinstance(found, Failed):
            return found
        self.has_stalled = True
        return replace(found, latency=replace(found.latency, p99=Interval(0.4, 0.3, math.inf)))

    has_stalled = False


@pytest.mark.parametrize(("idle", "shares"), [(0.6, (0.9, 1.1)), (0.0, (0.0, 0.8))])
def test_stall_does_not_exclude_higher_rates(
    reference_of: Callable[[SimulatedServer], Reference],
    space: Space,
    monkeypatch: pytest.MonkeyPatch,
    idle: float,
    shares: tuple[float, float],
) -> None:
    """Negative control: without the repetition it does."""
    monkeypatch.setattr(contest_module, "_IDLE", idle)
    server = Stalling(cores=2)
    contest = RateContest(reference_of(server), Target(p99_s=0.025), 2.0, 60.0)
    settled = contest.settle(contest.enter(space.default, math.inf), -math.inf)
    true = true_rate(SimulatedServer(cores=2), space.default, 0.025)
    assert server.has_stalled
    assert shares[0] * true <= settled.score.lower <= shares[1] * true


def test_bracket_ends_if_no_rate_lowers_p99(contest: RateContest, server: SimulatedServer, space: Space) -> None:
    """A candidate that stalls by itself does so at any rate; two rates are measured twice."""
    server.pauses = lambda _: (1.0, 0.3)
    settled = contest.settle(contest.enter(space.default, math.inf), -math.inf)
    assert settled.score.lower == 0
    opened = [call for call in server.measured if isinstance(call[1], OpenLoop)]
    assert len({call[1] for call in opened}) == 3
    again = [call for call in opened if call[3] == contest_module._AGAIN]
    assert 1 <= len({call[1] for call in again}) <= contest_module._EXCUSED


# Comparisons under a given load.

MakeReference = Callable[[SimulatedServer], Reference]


def load_contest(make: MakeReference, target: Target) -> LoadContest:
    return LoadContest(make(SimulatedServer(cores=2)), target, 2.0, 60.0)


def test_missed_rate_has_a_reason(reference_of: MakeReference, space: Space) -> None:
    contest = load_contest(reference_of, Target(p99_s=0.02, rate=500.0, objective=Objective.LATENCY))
    advanced = contest.advance(contest.enter(space.default, 1000.0), 10.0, 0.0)
    assert "answers" in advanced.lost
    assert math.isinf(advanced.score.lower)


@pytest.mark.parametrize(
    ("objective", "words"),
    [(Objective.MEMORY, "MiB"), (Objective.COST, "CPU ms a request"), (Objective.LATENCY, "p99 ")],
)
def test_units_and_order_of_objectives(
    reference_of: MakeReference, space: Space, objective: Objective, words: str
) -> None:
    judge = load_contest(reference_of, Target(p99_s=0.5, rate=30.0, objective=objective))
    small, large = (
        judge.settle(judge.enter(space.default.with_values({INSTANCES: count}), 1000.0), 0) for count in (1, 4)
    )
    assert words in judge.describe(small.score.lower)
    assert judge.describe(-math.inf) == "nothing that meets the target"
    if objective is not Objective.COST:
        assert small.score.is_above(large.score)
        assert not judge.is_tie(large, small)
    assert judge.is_tie(small, small)


@dataclass
class Constant:
    """A reference with a constant result."""

    measured: Measured

    def measure(self, *_: object) -> Measured:
        return self.measured

    def affords(self, *_: object) -> bool:
        return True


@pytest.mark.parametrize("objective", [Objective.LATENCY, Objective.MEMORY])
@pytest.mark.parametrize(("wide_s", "meets"), [(0.05, True), (0.2, False)])
def test_undecided_bound_is_replaced_by_the_wide_one(
    space: Space, objective: Objective, wide_s: float, meets: bool
) -> None:
    """On a machine with changing speed, no measurement is long enough for the distribution-free bound."""
    measured = tuned.measured(100, 0.02)
    latency = replace(measured.latency, p99=Interval(0.02, 0.0, math.inf), p99_wide_s=wide_s)
    reference = cast("Reference", Constant(replace(measured, latency=latency)))
    judge = LoadContest(reference, Target(p99_s=0.1, rate=100.0, objective=objective), 2.0, 60.0)
    settled = judge.settle(judge.enter(space.default, 1000.0), 0)
    assert settled.lost == ""
    assert math.isfinite(settled.score.lower) is meets


@pytest.mark.parametrize(("objective", "what"), [(Objective.MEMORY, "memory"), (Objective.COST, "CPU time")])
def test_unknown_figure_eliminates(reference_of: MakeReference, space: Space, objective: Objective, what: str) -> None:
    class Blind(SimulatedServer):
        def measure(self, *arguments: Any) -> Measured | Failed:
            found = super().measure(*arguments)
            return replace(cast("Measured", found), memory_bytes=None, server_cores=None)

    target = Target(p99_s=0.08, rate=30.0, objective=objective)
    blind = LoadContest(reference_of(Blind(cores=2)), target, 2.0, 60.0)
    assert blind.advance(blind.enter(space.default, 1000.0), 5.0, 0.0).lost == f"its {what} cannot be read here"


AT_60 = Target(p99_s=0.08, rate=60.0, objective=Objective.LATENCY)
ARRIVALS = {
    "Poisson": Arriving(),
    "bursts": Arriving(burst=2),
}


@pytest.mark.parametrize("arriving", ARRIVALS.values(), ids=ARRIVALS)
class TestStalls:
    """A first measurement of a second (two with bursts), 2.5 s after the start of the server."""

    def advance(self, reference_of: MakeReference, space: Space, server: SimulatedServer) -> CandidateScore:
        judge, seconds = LoadContest(reference_of(server), AT_60, 1.0, 60.0), float(server.arriving.burst)
        return judge.advance(judge.enter(space.fixed({"engine": "openvino"}).default, 1000.0), seconds, 0.0)

    def test_stall_of_the_machine_is_no_failure(
        self, reference_of: MakeReference, space: Space, arriving: Arriving, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Negative control: without the repetition it is."""
        stalls = [(2.8, 0.6 if arriving.burst > 1 else 0.28)]
        advanced = self.advance(reference_of, space, SimulatedServer(cores=2, stalls=stalls, arriving=arriving))
        assert advanced.lost == ""
        first, second = (point.measured for point in advanced.points)
        assert first.latency.p99.lower > AT_60.p99_s
        assert second.seconds > 10
        monkeypatch.setattr(LoadContest, "_is_strange", lambda *_: False)
        advanced = self.advance(reference_of, space, SimulatedServer(cores=2, stalls=stalls, arriving=arriving))
        assert advanced.lost.startswith("p99 was ")

    @pytest.mark.parametrize(("every_s", "own_s"), [(1.5, 0.3), (5.6, 0.6)])
    def test_repeated_stalls_are_a_failure(
        self, reference_of: MakeReference, space: Space, arriving: Arriving, every_s: float, own_s: float
    ) -> None:
        """The candidate fails whether or not the first measurement contains a stall."""
        server = SimulatedServer(cores=2, pauses=lambda _: (every_s, own_s), arriving=arriving)
        judge = LoadContest(reference_of(server), AT_60, 1.0, 60.0)
        advanced = self.advance(reference_of, space, server)
        settled = judge.settle(advanced, 0)
        assert settled.lost.startswith("p99 was ") or math.isinf(settled.score.lower)


def test_similar_latencies_are_ties(reference_of: MakeReference, space: Space) -> None:
    judge = load_contest(reference_of, AT_60)
    best, near, far = (
        CandidateScore(candidate=space.default, score=Interval(-p99_s, -p99_s * 1.01, -p99_s * 0.99))
        for p99_s in (0.020, 0.0219, 0.0225)
    )
    assert judge.is_tie(near, best)
    assert not judge.is_tie(far, best)
