"""Bare sessions rule out only what no scheduler can save."""

from __future__ import annotations

import pytest

from graphkiln.tuning.candidate import INSTANCES, MAX_BATCH_SIZE, Candidate
from graphkiln.tuning.space import bound_of, objection
from graphkiln.tuning.target import Objective, Target
from graphkiln.tuning.trials import Bare, Failed

BARE = Bare(batch_s={1: 0.010, 8: 0.045})
TARGET = Target(p99_s=0.05)


def candidate(instances: int, batch: int) -> Candidate:
    return Candidate.of({INSTANCES: instances, MAX_BATCH_SIZE: batch})


def test_the_fastest_batch_of_each_instance_bounds_the_rate() -> None:
    assert bound_of(candidate(1, 1), BARE).rate == pytest.approx(1.2 / 0.010)
    assert bound_of(candidate(2, 8), BARE).rate == pytest.approx(1.2 * 2 * 8 / 0.045)
    assert bound_of(candidate(1, 1), BARE).latency_s == pytest.approx(0.010 / 1.2)


def test_sizes_that_were_not_measured_lie_on_a_line() -> None:
    assert bound_of(candidate(1, 4), BARE).rate == pytest.approx(1.2 * 4 / 0.025)
    assert bound_of(candidate(1, 15), BARE).rate == pytest.approx(1.2 * 15 / 0.080)
    assert bound_of(candidate(1, 8), Bare(batch_s={1: 0.01})).rate == pytest.approx(1.2 * 800)


@pytest.mark.parametrize(
    ("bare", "target", "reason"),
    [
        (BARE, TARGET, ""),
        (Failed(reason="it did not load"), TARGET, "it did not load"),
        (Bare(batch_s={1: 0.01}, accuracy="0.3 off"), TARGET, "changes the outputs: 0.3 off"),
        (Bare(batch_s={1: 0.01}, accuracy_lost=0.004), Target(p99_s=1, accuracy_floor=0.005), ""),
        (Bare(batch_s={1: 0.01}, accuracy_lost=0.006), Target(p99_s=1, accuracy_floor=0.005), "loses 0.60%"),
        (Bare(batch_s={1: 0.06}), TARGET, ""),  # within the slack
        (Bare(batch_s={1: 0.07}), TARGET, "alone takes 70 ms"),
        (BARE, Target(p99_s=0.05, rate=250, objective=Objective.COST), "at most 213 requests"),
    ],
)
def test_what_cannot_meet_the_target_is_told(bare: Bare | Failed, target: Target, reason: str) -> None:
    said = objection(candidate(1, 8), bare, target)
    assert reason in said
    assert bool(said) == bool(reason)
