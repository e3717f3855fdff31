"""What is said of candidates when a search is over."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import cast

import pytest
from tuned import measured

from graphkiln.tuning.candidate import MAX_BATCH_SIZE, SESSION_KEYS, Candidate
from graphkiln.tuning.contest import LoadContest, RateContest
from graphkiln.tuning.drift import Reference
from graphkiln.tuning.result import Point, Standing
from graphkiln.tuning.search import NO_TIME, Conclusion, Probes, bound_notes, has_reached, unmeasured
from graphkiln.tuning.space import Space
from graphkiln.tuning.statistics import Interval
from graphkiln.tuning.target import Objective, Target
from graphkiln.tuning.trials import Bare, Failed, OpenLoop

BY_RATE = Target(p99_s=0.08)
BY_LATENCY = Target(p99_s=0.08, rate=60.0, objective=Objective.LATENCY)


def stands(candidate: Candidate, lower: float, p99_s: float = 0.02, lost: str = "") -> Standing:
    points = (Point(load=OpenLoop(abs(lower) or 1.0), measured=measured(100, p99_s)),)
    return Standing(candidate=candidate, score=Interval(lower, lower, lower), points=points, lost=lost)


def conclude(space: Space, chosen: Standing | None, *others: Standing, target: Target = BY_RATE) -> Conclusion:
    """All others were measured as exactly as it goes."""
    contest = (LoadContest if target.rate else RateContest)(cast("Reference", None), target, 2.0, 60.0)
    sessions = {each.restricted_to(SESSION_KEYS): Bare(batch_s={1: 0.001}) for each in space.candidates}
    return Conclusion(
        space=space,
        target=target,
        contest=contest,
        probes=Probes(sessions=sessions),
        settled={each.candidate for each in others},
        chosen=chosen,
        cores=2,
    )


@pytest.mark.parametrize(
    ("target", "lower", "reached"),
    [(BY_RATE, 0.0, False), (BY_RATE, 5.0, True), (BY_LATENCY, -0.01, True), (BY_LATENCY, -math.inf, False)],
)
def test_the_target_was_met_or_not(space: Space, target: Target, lower: float, reached: bool) -> None:
    assert has_reached(stands(space.default, lower), target) is reached


def test_the_closest_is_the_best_that_met_the_target_though_it_was_not_proven(space: Space) -> None:
    """The lowest p99 of all is that of a low rate."""
    first, second, third = space.candidates[:3]
    fast, slow, missed = stands(first, 90.0, 0.07), stands(second, 10.0, 0.01), stands(third, 0.0, 0.005)
    found = conclude(space, None, fast, slow, missed)
    rows = [found.row(each) for each in (fast, slow, missed)]
    assert found.closest(rows) is rows[0]
    assert found.closest(rows[2:]) is rows[2]
    assert found.closest([]) is None


def test_where_no_load_met_the_target_the_score_says_so(space: Space) -> None:
    missed = stands(space.default, 0.0)
    row = conclude(space, None, missed).row(replace(missed, score=Interval(40.0, 0.0, 50.0)))
    assert row.score == "40 requests per second; no load met the target"


def test_each_reason_is_what_was_found(space: Space) -> None:
    simple, other = space.default, space.default.with_values({MAX_BATCH_SIZE: 16})
    chosen = stands(simple, 90.0)
    tie, worse, none = stands(other, 89.0), stands(other, 50.0), stands(other, 0.0)

    def reason(standing: Standing, *settled: Standing) -> str:
        return conclude(space, chosen, *settled).row(standing).standing.lost

    assert reason(tie, tie) == "no significant difference from the chosen one, which is simpler"
    assert reason(worse, worse) == "50 requests per second, the chosen one 90 requests per second"
    assert reason(none, none).startswith("did not meet the target at the load of the chosen one")
    assert reason(worse) == "the budget was spent before it was compared with the chosen one"
    assert reason(worse.out("it hung"), worse) == "it hung"
    assert reason(chosen) == ""


def test_a_tie_that_is_simpler_than_the_winner_of_a_race_is_told_by_its_figures(space: Space) -> None:
    simple, other = space.default, space.default.with_values({MAX_BATCH_SIZE: 16})
    chosen, tie = stands(other, -0.010), stands(simple, -0.0105)
    lost = conclude(space, chosen, tie, target=BY_LATENCY).row(tie).standing.lost
    assert lost == "p99 10.5 ms, the chosen one p99 10 ms"


def test_what_was_never_measured_says_whether_the_budget_is_to_blame(space: Space) -> None:
    entered = replace(stands(space.default, 0.0), points=())
    assert unmeasured(space.default, None).by_budget
    assert unmeasured(space.default, entered.out(NO_TIME)).by_budget
    assert "more promising" in unmeasured(space.default, entered).reason
    failed = unmeasured(space.default, entered.out("it did not load"))
    assert (failed.reason, failed.by_budget) == ("it did not load", False)


def test_where_bare_sessions_rule_out_everything_the_fastest_is_told(space: Space) -> None:
    times = {"onnxruntime": 0.02, "openvino": 0.01}
    sessions: dict[Candidate, Bare | Failed] = {
        each: Bare(batch_s={1: times[str(each["engine"])]})
        for each in {candidate.restricted_to(SESSION_KEYS) for candidate in space.candidates}
    }
    wrong = next(each for each in sessions if each["engine"] == "openvino" and each["precision"] == "int8")
    sessions[wrong] = Bare(batch_s={1: 0.001}, accuracy="int8: outputs differ")
    probes = Probes(sessions=sessions)
    (note,) = bound_notes(space, probes, Target(p99_s=0.005))
    assert note.startswith("no bare session takes less than 10 ms: engine=openvino, precision=")
    _, rate = bound_notes(space, probes, replace(BY_LATENCY, rate=9e6))
    assert rate.startswith("no bare sessions reach more than ")
    assert "instances=4" in rate
    assert bound_notes(space, replace(probes, viable=space.candidates[:1]), BY_RATE) == []
    assert bound_notes(space, Probes(sessions={each: Failed(reason="no") for each in sessions}), BY_RATE) == []
