"""Several models: the parts of the space, and the rate that holds when all are loaded at once."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import tuned

from graphkiln.tuning.candidate import INSTANCES, THREADS, Candidate
from graphkiln.tuning.journal import Journal
from graphkiln.tuning.sharing import Plan, Response
from graphkiln.tuning.space import Space
from graphkiln.tuning.target import Target
from graphkiln.tuning.together import Prover, core_counts, with_cores
from graphkiln.tuning.trials import Failed, Measured
from graphkiln_backend.graph.errors import InvalidInput

SHARES = {"a": 0.75, "b": 0.25}
ONE = Response(candidate=Candidate.of({THREADS: 1}), rate=100.0, cores=1.0, memory_bytes=1)
PLAN = Plan(responses={"a": ONE, "b": ONE}, rate=100.0, cores=2.0, memory_bytes=2, limited_by="a")


class Shared:
    """Both models meet the target up to a rate of both together; beyond another one requests are not even answered."""

    def __init__(self, holds: float, fault: str = "", answers: float = 1e3) -> None:
        self.holds, self.fault, self.answers = holds, fault, answers
        self.asked = list[Mapping[str, float]]()

    def __call__(self, rates: Mapping[str, float], seconds: float, seed: int) -> dict[str, Measured | Failed]:
        del seconds, seed
        self.asked.append(rates)
        whole = sum(rates.values())
        p99_s = 0.02 if whole <= self.holds else 0.4
        answered = min(1.0, self.answers / whole)
        found: dict[str, Measured | Failed] = {
            name: tuned.measured(rate * answered, p99_s, seconds=1000 / rate) for name, rate in rates.items()
        }
        return {**found, "b": Failed(reason=self.fault)} if self.fault else found


def prover(left_s: float = 1e3) -> Prover:
    tunings = cast("dict[str, Any]", {name: SimpleNamespace(target=Target(p99_s=0.1)) for name in SHARES})
    return Prover(tunings=tunings, shares=SHARES, left_s=left_s)


def test_a_model_gets_powers_of_two_or_all_that_is_left() -> None:
    assert core_counts(2, 2) == [1]
    assert core_counts(8, 3) == [1, 2, 4, 6]
    assert core_counts(1, 1) == [1]
    with pytest.raises(InvalidInput, match="3 models on 2 cores"):
        core_counts(2, 3)


def test_a_part_of_the_space_keeps_so_many_cores_busy(space: Space) -> None:
    part = with_cores(space, 2)
    assert part.candidates
    assert {each.number(THREADS) * each.number(INSTANCES) for each in part.candidates} == {2}
    assert set(part.candidates) < set(space.candidates)


def test_the_rate_is_lowered_until_all_models_meet_the_target(tmp_path: Path) -> None:
    shared = Shared(holds=80.0)
    with Journal(tmp_path / "j", {}) as journal:
        rate, measured, reason = prover().prove(PLAN, shared, journal)
    assert rate == pytest.approx(72.25)
    assert reason == ""
    assert set(measured) == {"a", "b"}
    assert shared.asked[0] == {"a": 75.0, "b": 25.0}
    assert len(shared.asked) == 3


def test_what_was_answered_of_too_much_says_what_to_try_next(tmp_path: Path) -> None:
    shared = Shared(holds=30.0, answers=30.0)
    with Journal(tmp_path / "j", {}) as journal:
        assert prover().prove(PLAN, shared, journal)[0] == pytest.approx(0.85 * 30)
    assert len(shared.asked) == 2


def test_a_server_that_answers_nothing_is_not_asked_for_nothing(tmp_path: Path) -> None:
    shared = Shared(holds=0.0, answers=0.0)
    with Journal(tmp_path / "j", {}) as journal:
        assert prover().prove(PLAN, shared, journal)[0] is None
    assert [sum(rates.values()) for rates in shared.asked[:3]] == pytest.approx([100.0, 10.0, 1.0])


def test_a_queue_that_grows_holds_no_rate_however_short_it_is_yet(tmp_path: Path) -> None:
    with Journal(tmp_path / "j", {}) as journal:
        rate, _, reason = prover(left_s=0.0).prove(PLAN, Shared(holds=1e3, answers=60.0), journal)
    assert rate is None
    assert reason.startswith("a: answers 45 of 75 requests per second beside the others")


def test_nothing_is_measured_twice(tmp_path: Path) -> None:
    for _ in range(2):
        shared = Shared(holds=80.0)
        with Journal(tmp_path / "j", {}) as journal:
            rate, _, _ = prover().prove(PLAN, shared, journal)
        assert rate == pytest.approx(72.25)
    assert shared.asked == []


def test_a_model_that_fails_is_the_reason(tmp_path: Path) -> None:
    shared = Shared(80.0, fault="died")
    with Journal(tmp_path / "j", {}) as journal:
        rate, _, reason = prover().prove(PLAN, shared, journal)
    assert rate is None
    assert reason == "b: died"
    assert len(shared.asked) == 1, "no other rate is tried"


def test_what_the_machine_may_be_to_blame_for_is_measured_again(tmp_path: Path) -> None:
    class Collided(Shared):
        def __call__(self, *arguments: Any) -> dict[str, Measured | Failed]:
            return {**super().__call__(*arguments), "b": Failed(reason="port 1 (HTTP) is in use", passing=True)}

    with Journal(tmp_path / "j", {}) as journal:
        assert prover().prove(PLAN, Collided(80.0), journal)[0] is None
    with Journal(tmp_path / "j", {}) as journal:
        assert prover().prove(PLAN, Shared(holds=200.0), journal)[0] == 100.0


def test_a_spent_budget_ends_it_after_one_measurement(tmp_path: Path) -> None:
    shared = Shared(holds=1.0)
    with Journal(tmp_path / "j", {}) as journal:
        rate, _, reason = prover(left_s=0.0).prove(PLAN, shared, journal)
    assert rate is None
    assert len(shared.asked) == 1
    assert reason.endswith("beside the others, and the budget is spent")
