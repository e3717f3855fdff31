"""Near-ties: the one that is better wins, though its bracket was worse."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
from simulated_server import SimulatedServer

from graphkiln.tuning.candidate import INSTANCES, MAX_BATCH_SIZE, THREADS, Candidate
from graphkiln.tuning.drift import Reference
from graphkiln.tuning.rematch import rematch
from graphkiln.tuning.space import Space
from graphkiln.tuning.standing import Standing
from graphkiln.tuning.statistics import Interval


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
    first, second = rematch([worse, better], worse, reference, lambda: True, 30.0, simplicity=simplicity)
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
            near, best, reference, lambda: True, 30.0, simplicity=lambda each: (each.number(MAX_BATCH_SIZE), 0, "")
        )
        assert first.candidate == simple.candidate
        assert second.lost.endswith("which says nothing; the chosen one is simpler")


def test_all_get_the_same_arrivals_and_new_ones_in_each_round(
    pair: tuple[Standing, Standing], reference_of: Callable[[SimulatedServer], Reference]
) -> None:
    server = SimulatedServer(cores=2, noise=0.05)
    rematch([pair[0]], pair[1], reference_of(server), lambda: True, 30.0, simplicity=simplicity)
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
            30.0,
            simplicity=simplicity,
        )
        == []
    )


def test_one_alone_is_not_measured(
    pair: tuple[Standing, Standing], reference_of: Callable[[SimulatedServer], Reference]
) -> None:
    server = SimulatedServer(cores=2)
    assert rematch([pair[1]], pair[1], reference_of(server), lambda: True, 30.0, simplicity=simplicity) == []
    assert server.measured == []


def test_one_that_fails_loses(
    pair: tuple[Standing, Standing], reference_of: Callable[[SimulatedServer], Reference]
) -> None:
    better, worse = pair
    server = SimulatedServer(cores=2, fault=lambda candidate: "crash" if candidate == better.candidate else "")
    first, second = rematch([better], worse, reference_of(server), lambda: True, 30.0, simplicity=simplicity)
    assert first.candidate == worse.candidate
    assert second.lost == "failed when near-ties were measured again"
