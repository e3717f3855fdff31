"""Ways to search a simulated server: what each is given, and what it says of itself."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import tuned
from simulated_server import SimulatedServer, simulated_space
from tune_ways import EXHAUSTIVE, Course, at_random, exhaustive, found_without_proof, judged

from graphkiln.tuning.candidate import ENGINE, INSTANCES, MAX_BATCH_SIZE, PRECISION, QUEUE_DELAY_US
from graphkiln.tuning.target import Target

FIXED = {ENGINE: "openvino", PRECISION: "bf16", QUEUE_DELAY_US: 0, MAX_BATCH_SIZE: 4, INSTANCES: 1}


@pytest.fixture
def course(tmp_path: Path) -> Course:
    @contextmanager
    def open_trials() -> Iterator[object]:
        server = SimulatedServer(cores=2)
        yield server, server.clock

    return Course(
        open_trials=open_trials,  # type: ignore[arg-type]
        space=simulated_space(2).fixed(FIXED), target=Target(p99_s=0.05), budget_s=60.0, cores=2, seed=0,
        shortest_s=1.0, journals=tmp_path,
    )  # fmt: skip


def test_an_exhaustive_search_that_was_cut_says_of_how_many(course: Course) -> None:
    whole = exhaustive(course)
    assert whole.name == EXHAUSTIVE
    assert whole.budget_s is None
    assert whole.candidate is not None
    cut = exhaustive(replace(course, journals=course.journals / "cut"), 3.0)
    assert cut.name.startswith(f"{EXHAUSTIVE}, 1 of ")
    assert cut.budget_s == 3.0
    assert at_random(course).budget_s == course.budget_s


def test_all_choices_are_judged_however_long_that_takes(course: Course) -> None:
    short = replace(course, budget_s=1e-6)
    candidates = short.space.candidates[:2]
    assert len(candidates) == 2
    assert set(judged(short, candidates)) == set(candidates)


def test_what_was_found_but_not_proven_is_named_without_a_promise(course: Course) -> None:
    rows = tuple(tuned.row(each, rate, 0.03) for each, rate in zip(course.space.candidates, (40.0, 90.0), strict=False))
    found = tuned.finished(course.space, course.target, met=False)
    assert found_without_proof(replace(found, rows=rows)) == course.space.candidates[1]
    assert found_without_proof(replace(found, rows=())) is None
