"""What is left, and what still fits."""

from __future__ import annotations

import math

import pytest

from graphkiln.tuning.candidate import Candidate
from graphkiln.tuning.journal import Budget

ONE, OTHER = Candidate.of({"threads": 1}), Candidate.of({"threads": 2})


def test_a_start_counts_where_another_candidate_is_served() -> None:
    budget = Budget(100.0)
    budget.take(ONE, 2.0, 14.0)
    assert budget.start_s == 12
    assert budget.needed_s(ONE, 3.0) == 4, "a second for the warm-up"
    assert budget.needed_s(OTHER, 3.0) == 15
    budget.take(ONE, 2.0, 2.5)  # no start: nothing is learned of starts
    assert budget.start_s == 12
    assert budget.needed_s(ONE, 3.0) == 3.5
    assert budget.left_s == pytest.approx(83.5)


def test_the_slowest_of_the_last_starts_counts() -> None:
    budget = Budget(100.0)
    for number, start_s in enumerate((9.0, 1.0, 4.0, 2.0)):
        budget.take((ONE, OTHER)[number % 2], 1.0, 1.0 + start_s)
    assert budget.start_s == 4


def test_time_for_the_confirmation_is_kept() -> None:
    budget = Budget(100.0)
    budget.take(ONE, 10.0, 50.0)
    assert budget.start_s == 40
    assert budget.searching_s == pytest.approx(100 - 50 - (40 + 8))
    assert budget.affords(ONE, 1.0)
    assert not budget.affords(ONE, 1.5)
    assert not budget.affords(OTHER, 0.0)


def test_after_a_failure_or_a_probe_a_server_starts_again() -> None:
    budget = Budget(100.0)
    budget.take(ONE, 1.0, 4.0)
    budget.take(ONE, 1.0, 30.0, failed=True)
    assert budget.start_s == 3, "what a failure takes is no start"
    assert budget.needed_s(ONE, 1.0) == 4
    budget.take(ONE, 1.0, 4.0)
    budget.take_probe(7.0)
    assert budget.probe_s == 7
    assert budget.needed_s(ONE, 1.0) == 4
    assert budget.spent_s == 45


def test_an_endless_budget_affords_everything() -> None:
    budget = Budget(math.inf)
    budget.take(ONE, 1e6, 1e6)
    assert budget.affords(OTHER, 1e9)


def test_who_serves_is_known() -> None:
    budget = Budget(100.0)
    assert not budget.serves(ONE)
    budget.take(ONE, 1.0, 4.0)
    assert (budget.serves(ONE), budget.serves(OTHER)) == (True, False)
    budget.take_probe(1.0)
    assert not budget.serves(ONE)


def test_what_took_longest_is_told() -> None:
    budget = Budget(10.0)
    assert budget.longest == ""
    budget.take_probe(3.0)
    assert budget.longest == ": a session takes 3 s to be built and timed"
    budget.take(ONE, 2.0, 14.0)
    budget.take(ONE, 2.0, 90.0)
    assert budget.longest == ": a server takes 12 s to start", "a long warm-up is no start"
    budget.take(OTHER, 2.0, 60.0, failed=True)
    assert budget.longest == ": a candidate that failed took 60 s"
