"""The comparison of searches: rows, parts, and each search of a simulated server."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import tune_quality
import tuned
from simulated_server import SimulatedServer, simulated_space
from tune_quality import (
    COLUMNS,
    DEFAULT,
    EXHAUSTIVE,
    MODELS,
    OURS,
    RANDOM,
    Choice,
    Course,
    Model,
    benchmark_tune,
    best_without_proof,
    measure_again,
    real_rows,
    row_of,
    search_at_random,
    search_exhaustively,
)

from graphkiln.tuning.candidate import ENGINE, INSTANCES, MAX_BATCH_SIZE, PRECISION, QUEUE_DELAY_US, Candidate
from graphkiln.tuning.target import Target

ONE, TWO, SLOW = (Candidate.of({"threads": number}) for number in (1, 2, 3))
FOUND = [
    Choice(name=OURS, candidate=TWO, spent_s=99.0, measurements=20, promised=90.0),
    Choice(name=RANDOM, candidate=ONE, spent_s=101.0, measurements=15),
    Choice(name=DEFAULT, candidate=SLOW),
    Choice(name=EXHAUSTIVE, candidate=ONE, spent_s=600.0, measurements=80),
]


def test_rates_are_compared_with_the_best_of_all() -> None:
    rows = real_rows("m", FOUND, {ONE: 100.0, TWO: 97.0}, "2 of 3")
    assert {row["set-up"]: row["ratio"] for row in rows} == {OURS: 0.97, RANDOM: 1.0, DEFAULT: 0.0, EXHAUSTIVE: 1.0}
    assert [row["perf_analyzer within p99"] for row in rows] == ["2 of 3", "-", "-", "-"]
    assert [row["promised/s"] for row in rows] == ["90.0", "-", "-", "-"]
    assert rows[0]["requests/s"] == "97.0"


def test_runs_of_the_same_search_are_one_row() -> None:
    row = row_of("m", [(FOUND[0], 1.0), (FOUND[0], 0.94), (FOUND[0], 0.95)])
    assert (row["runs"], row["ratio"], row["least"], row["runs of 0.95"]) == (3, 0.95, 0.94, 2)


def measure_nothing(monkeypatch: pytest.MonkeyPatch, folder: Path) -> list[tuple[str, float]]:
    """Record the requested parts; each has one row."""
    asked: list[tuple[str, float]] = []

    def real(name: str, model: Model, _journals: Path, _seconds: float) -> list[dict[str, object]]:
        asked.append((name, model.budget_s))
        return [{"model": f"{name}, held out", "ratio": 0.5}]

    monkeypatch.setattr(tune_quality, "PARTS", folder / "parts")
    monkeypatch.setattr(tune_quality, "KEPT", folder / "tune.json")
    monkeypatch.setattr(tune_quality, "_measure_real", real)
    (folder / "tune.json").write_text(json.dumps({"rows": [{"model": "simulated", "ratio": 1.0}]}))
    return asked


def test_one_part_is_measured_with_the_given_budget(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked = measure_nothing(monkeypatch, tmp_path)
    rows = benchmark_tune(1, 1.5, "vit_tiny", 30.0)
    assert asked == [("vit_tiny", 30.0)]
    assert [(row["model"], row["ratio"]) for row in rows] == [("simulated", 1.0), ("vit_tiny, held out", 0.5)]
    assert all(tuple(row) == COLUMNS for row in rows)
    benchmark_tune(1, 1.5, "vit_tiny")
    assert asked[1] == ("vit_tiny", MODELS["vit_tiny"].budget_s)


def test_an_unknown_part_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked = measure_nothing(monkeypatch, tmp_path)
    with pytest.raises(SystemExit, match="--only vit: there is no such part; one of simulated, mobilenet_v3_small"):
        benchmark_tune(1, 1.5, "vit")
    assert asked == []


# Searches of a simulated server.

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


def test_the_name_of_an_incomplete_exhaustive_search_has_its_share(course: Course) -> None:
    whole = search_exhaustively(course)
    assert whole.name == EXHAUSTIVE
    assert whole.budget_s is None
    assert whole.candidate is not None
    cut = search_exhaustively(replace(course, journals=course.journals / "cut"), 3.0)
    assert cut.name.startswith(f"{EXHAUSTIVE}, 1 of ")
    assert cut.budget_s == 3.0
    assert search_at_random(course).budget_s == course.budget_s


def test_all_choices_are_measured_again_whatever_the_budget(course: Course) -> None:
    short = replace(course, budget_s=1e-6)
    candidates = short.space.candidates[:2]
    assert len(candidates) == 2
    assert set(measure_again(short, candidates)) == set(candidates)


def test_a_candidate_found_without_a_proof_is_chosen(course: Course) -> None:
    rows = tuple(tuned.row(each, rate, 0.03) for each, rate in zip(course.space.candidates, (40.0, 90.0), strict=False))
    found = tuned.finished(course.space, course.target, met=False)
    assert best_without_proof(replace(found, rows=rows)) == course.space.candidates[1]
    assert best_without_proof(replace(found, rows=())) is None
