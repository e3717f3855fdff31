"""The comparison of searches: its rows, and what is compared with what."""

from __future__ import annotations

import pytest
from tune_promise import Held
from tune_quality import real_rows, row_of
from tune_ways import DEFAULT, EXHAUSTIVE, OURS, RANDOM, Choice

from graphkiln.tuning.candidate import Candidate

ONE, TWO, SLOW = (Candidate.of({"threads": number}) for number in (1, 2, 3))
FOUND = [
    Choice(name=OURS, candidate=TWO, spent_s=99.0, measurements=20, promised=90.0),
    Choice(name=RANDOM, candidate=ONE, spent_s=101.0, measurements=15),
    Choice(name=DEFAULT, candidate=SLOW),
    Choice(name=EXHAUSTIVE, candidate=ONE, spent_s=600.0, measurements=80),
]


def test_rates_are_compared_with_the_best_of_all() -> None:
    rows = real_rows("m", FOUND, {ONE: 100.0, TWO: 97.0}, Held(p99_ms=(49.0, 50.0, 51.0), target_ms=50.0))
    assert {row["set-up"]: row["ratio"] for row in rows} == {OURS: 0.97, RANDOM: 1.0, DEFAULT: 0.0, EXHAUSTIVE: 1.0}
    assert [row["perf_analyzer within p99"] for row in rows] == ["2 of 3", "-", "-", "-"]
    assert [row["promised/s"] for row in rows] == ["90.0", "-", "-", "-"]
    assert rows[0]["requests/s"] == "97.0"


def test_where_nothing_met_the_target_no_ratio_is_one() -> None:
    rows = real_rows("m", [Choice(name=OURS, candidate=None)], {}, None)
    assert [(row["ratio"], row["choice"], row["perf_analyzer within p99"]) for row in rows] == [(0.0, "none", "-")]


def test_runs_of_the_same_way_are_one_row() -> None:
    row = row_of("m", [(FOUND[0], 1.0), (FOUND[0], 0.94), (FOUND[0], 0.95)])
    assert (row["runs"], row["ratio"], row["least"], row["runs of 0.95"]) == (3, 0.95, 0.94, 2)


@pytest.mark.parametrize(("p99_ms", "within"), [((1.0, 2.0), 2), ((60.0, 50.0), 1)])
def test_a_repeat_at_the_target_is_within_it(p99_ms: tuple[float, ...], within: int) -> None:
    assert Held(p99_ms=p99_ms, target_ms=50.0).within == within
