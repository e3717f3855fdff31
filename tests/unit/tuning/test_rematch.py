"""Near-ties: the one that is better wins, though its bracket was worse."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import cast

import pytest
from simulated_server import SimulatedServer

from graphkiln.tuning.candidate import INSTANCES, MAX_BATCH_SIZE, THREADS, Candidate
from graphkiln.tuning.contest import LoadContest, RateContest
from graphkiln.tuning.drift import Reference
from graphkiln.tuning.result import Race, Standing
from graphkiln.tuning.search import rematch
from graphkiln.tuning.space import Space
from graphkiln.tuning.statistics import Interval
from graphkiln.tuning.target import Objective, Target
from graphkiln.tuning.trials import Failed, LoadShape, Measured

WORSE_RATE = 100.0


def race(rate: float, longest_s: float = 30.0) -> Race:
    """At a rate; whoever measures is no part of it."""
    contest = RateContest(cast("Reference", None), Target(p99_s=0.08), 2.0, longest_s)
    return contest.race(Standing(candidate=Candidate.of({}), score=Interval(rate, rate, rate)))


@pytest.fixture
def pair(tiny: Space) -> tuple[Standing, Standing]:
    """One that reached less than it can, and one whose rate was luck."""
    better = tiny.default.with_values({THREADS: 1, INSTANCES: 2})
    worse = tiny.default.with_values({THREADS: 1, INSTANCES: 1})
    return (
        Standing(candidate=better, score=Interval(95, 94, 99)),
        Standing(candidate=worse, score=Interval(101, 100, 103)),
    )


def simplicity(candidate: Candidate) -> tuple[int, int, str]:
    """One instance is simpler than two."""
    return (candidate.number(INSTANCES), 0, "")


def test_the_better_one_wins(
    pair: tuple[Standing, Standing], reference_of: Callable[[SimulatedServer], Reference]
) -> None:
    better, worse = pair
    reference = reference_of(SimulatedServer(cores=2, noise=0.05))
    first, second = rematch([worse, better], worse, reference, lambda: True, race(WORSE_RATE), simplicity=simplicity)
    assert (first.candidate, first.lost, first.score.lower) == (better.candidate, "", 100.0)
    assert second.candidate == worse.candidate
    assert second.lost.startswith("a near-tie, measured 2 times more: ")


def test_of_those_that_no_round_tells_apart_the_simplest_wins(
    tiny: Space, reference_of: Callable[[SimulatedServer], Reference]
) -> None:
    """The same but for a key that changes nothing at this rate, and which of both came first."""
    simple = Standing(candidate=tiny.default.with_values({MAX_BATCH_SIZE: 8}), score=Interval(20, 20, 20))
    other = Standing(candidate=tiny.default.with_values({MAX_BATCH_SIZE: 16}), score=Interval(20, 20, 20))
    for near, best in (([simple], other), ([other], simple)):
        reference = reference_of(SimulatedServer(cores=2))
        first, second = rematch(
            near,
            best,
            reference,
            lambda: True,
            race(20.0),
            simplicity=lambda each: (each.number(MAX_BATCH_SIZE), 0, ""),
        )
        assert first.candidate == simple.candidate
        assert second.lost.endswith("the chosen one is simpler")


def test_all_get_the_same_arrivals_and_new_ones_in_each_round(
    pair: tuple[Standing, Standing], reference_of: Callable[[SimulatedServer], Reference]
) -> None:
    server = SimulatedServer(cores=2, noise=0.05)
    rematch([pair[0]], pair[1], reference_of(server), lambda: True, race(WORSE_RATE), simplicity=simplicity)
    seeds = [call[3] for call in server.measured]
    assert seeds[:4] == [1, 1, 2, 2]
    assert {call[1] for call in server.measured} == {server.measured[0][1]}


def test_a_round_that_was_not_finished_does_not_count(
    pair: tuple[Standing, Standing], reference_of: Callable[[SimulatedServer], Reference]
) -> None:
    turns = itertools.count()
    assert (
        rematch(
            [pair[0]],
            pair[1],
            reference_of(SimulatedServer(cores=2)),
            lambda: next(turns) < 3,
            race(WORSE_RATE),
            simplicity=simplicity,
        )
        == []
    )


def test_one_alone_is_not_measured(
    pair: tuple[Standing, Standing], reference_of: Callable[[SimulatedServer], Reference]
) -> None:
    server = SimulatedServer(cores=2)
    assert (
        rematch([pair[1]], pair[1], reference_of(server), lambda: True, race(WORSE_RATE), simplicity=simplicity) == []
    )
    assert server.measured == []


def test_one_that_fails_loses(
    pair: tuple[Standing, Standing], reference_of: Callable[[SimulatedServer], Reference]
) -> None:
    better, worse = pair
    server = SimulatedServer(cores=2, fault=lambda candidate: "crash" if candidate == better.candidate else "")
    first, second = rematch(
        [better], worse, reference_of(server), lambda: True, race(WORSE_RATE), simplicity=simplicity
    )
    assert first.candidate == worse.candidate
    assert second.lost == "the server died with signal 11"


def test_there_is_no_race_without_the_time_for_two_rounds(
    pair: tuple[Standing, Standing], reference_of: Callable[[SimulatedServer], Reference]
) -> None:
    """Starts of five seconds are expected, ten are measured, and something is kept for the proof."""
    for budget_s, is_run in ((70.0, False), (110.0, True)):
        server = SimulatedServer(cores=2, noise=0.05)
        reference = reference_of(server)
        reference.trials.budget.total_s = budget_s
        rematch([pair[0]], pair[1], reference, lambda: True, race(WORSE_RATE, 10.0), simplicity=simplicity)
        assert bool(server.measured) is is_run


LATENCY = Target(p99_s=0.08, rate=60.0, objective=Objective.LATENCY)


class Moody(SimulatedServer):
    """Each start of a server has its own luck, which lasts; what differs between two set-ups may be that alone."""

    def measure(self, candidate: Candidate, load: LoadShape, seconds: float, seed: int) -> Measured | Failed:
        found = super().measure(candidate, load, seconds, seed)
        assert isinstance(found, Measured)
        return replace(found, latency=found.latency.scaled(1.0 + 0.15 * self._luck(candidate, seed)))

    def _luck(self, candidate: Candidate, seed: int) -> float:
        return ((int(candidate.id, 16) >> seed) % 8) / 8


@pytest.mark.parametrize("better", [False, True])
def test_what_serves_today_leaves_only_for_what_is_surely_better(
    tiny: Space, reference_of: Callable[[SimulatedServer], Reference], better: bool
) -> None:
    """A configuration that differs in nothing that matters at this rate, though it looked better; and one that does."""
    reference = reference_of(Moody(cores=2))
    contest = LoadContest(reference, LATENCY, 2.0, 60.0)
    today = tiny.default.with_values({THREADS: 1 if better else 2})
    other = tiny.default.with_values({THREADS: 2, MAX_BATCH_SIZE: 8 if better else 16})
    behind = Standing(candidate=today, score=Interval(-0.014, -0.015, -0.013))
    best = Standing(candidate=other, score=Interval(-0.010, -0.011, -0.009))
    ranks = [today, other]
    raced = rematch(
        [behind], best, reference, lambda: True, contest.race(best), simplicity=lambda each: (ranks.index(each), 0, "")
    )  # type: ignore[arg-type]
    assert raced[0].candidate == (other if better else today)
    assert raced[0].score == (best if better else behind).score, "its own figures"
    assert raced[1].lost.startswith("a near-tie, measured ")
    assert "p99 under the same load" in raced[1].lost
