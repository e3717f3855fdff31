"""Under a given load: who meets the target, and who is better at what is asked."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, cast

import pytest
import tuned
from simulated_server import SimulatedServer

from graphkiln.tuning.candidate import INSTANCES
from graphkiln.tuning.drift import Reference
from graphkiln.tuning.load_contest import LoadContest
from graphkiln.tuning.space import Space
from graphkiln.tuning.standing import Standing
from graphkiln.tuning.statistics import Interval
from graphkiln.tuning.target import Objective, Target
from graphkiln.tuning.trials import ClosedLoop, Failed, Measured, OpenLoop

MakeReference = Callable[[SimulatedServer], Reference]


def contest(make: MakeReference, target: Target) -> LoadContest:
    return LoadContest(make(SimulatedServer(cores=2)), target, 2.0, 60.0)


def test_the_load_is_the_given_one_or_one_caller(reference_of: MakeReference) -> None:
    rate = Target(p99_s=0.08, rate=30.0, objective=Objective.COST)
    assert contest(reference_of, rate).load == OpenLoop(30.0)
    assert contest(reference_of, Target(p99_s=0.08, objective=Objective.LATENCY)).load == ClosedLoop(1)


def test_a_rate_that_is_met_is_proven(reference_of: MakeReference, space: Space) -> None:
    target = Target(p99_s=0.08, rate=30.0, objective=Objective.LATENCY)
    settled = contest(reference_of, target).settle(Standing(candidate=space.default, score=Interval(0, 0, 0)), 0)
    assert settled.lost == ""
    assert settled.points[-1].measured.latency.p99.upper <= 0.08
    assert settled.score.lower == -settled.points[-1].measured.latency.p99.upper


@pytest.mark.parametrize(("rate", "reason"), [(500.0, "answers"), (95.0, "p99 of|answers")])
def test_a_rate_that_is_missed_is_told(reference_of: MakeReference, space: Space, rate: float, reason: str) -> None:
    target = Target(p99_s=0.02, rate=rate, objective=Objective.LATENCY)
    advanced = contest(reference_of, target).advance(
        contest(reference_of, target).enter(space.default, 1000.0), 10.0, 0.0
    )
    assert any(each in advanced.lost for each in reason.split("|"))
    assert math.isinf(advanced.score.lower)


@pytest.mark.parametrize(
    ("objective", "words"),
    [(Objective.MEMORY, "MiB"), (Objective.COST, "CPU ms a request"), (Objective.LATENCY, "p99 ")],
)
def test_each_objective_has_its_unit_and_less_is_better(
    reference_of: MakeReference, space: Space, objective: Objective, words: str
) -> None:
    judge = contest(reference_of, Target(p99_s=0.5, rate=30.0, objective=objective))
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
class Restless:
    """Measures the same whatever it is asked."""

    measured: Measured

    def measure(self, *_: object) -> Measured:
        return self.measured

    def affords(self, *_: object) -> bool:
        return True


@pytest.mark.parametrize("objective", [Objective.LATENCY, Objective.MEMORY])
@pytest.mark.parametrize(("wide_s", "meets"), [(0.05, True), (0.2, False)])
def test_a_machine_whose_speed_changes_is_judged_widely(
    space: Space, objective: Objective, wide_s: float, meets: bool
) -> None:
    """No measurement is long enough there for a bound without assumptions."""
    measured = tuned.measured(100, 0.02)
    latency = replace(measured.latency, p99=Interval(0.02, 0.0, math.inf), p99_wide_s=wide_s)
    reference = cast("Reference", Restless(replace(measured, latency=latency)))
    judge = LoadContest(reference, Target(p99_s=0.1, rate=100.0, objective=objective), 2.0, 60.0)
    settled = judge.settle(judge.enter(space.default, 1000.0), 0)
    assert settled.lost == ""
    assert math.isfinite(settled.score.lower) is meets


@pytest.mark.parametrize(("objective", "what"), [(Objective.MEMORY, "memory"), (Objective.COST, "CPU time")])
def test_what_cannot_be_read_decides_nothing(
    reference_of: MakeReference, space: Space, objective: Objective, what: str
) -> None:
    class Blind(SimulatedServer):
        def measure(self, *arguments: Any) -> Measured | Failed:
            found = super().measure(*arguments)
            return replace(cast("Measured", found), memory_bytes=None, server_cores=None)

    target = Target(p99_s=0.08, rate=30.0, objective=objective)
    blind = LoadContest(reference_of(Blind(cores=2)), target, 2.0, 60.0)
    assert blind.advance(blind.enter(space.default, 1000.0), 5.0, 0.0).lost == f"its {what} cannot be read here"
