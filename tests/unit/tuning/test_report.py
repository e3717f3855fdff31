"""The document of a search."""

from __future__ import annotations

import io
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from digits_subject import digits_subject
from rich.console import Console
from tuned import document, finished, measured, tuning

from graphkiln.tuning.candidate import Candidate
from graphkiln.tuning.report import (
    HEIGHT,
    WIDTH,
    Costs,
    curve,
    document_of,
    in_words,
    line_of,
    print_result,
    print_space,
    scatter,
)
from graphkiln.tuning.space import Exclusion
from graphkiln.tuning.statistics import Interval
from graphkiln.tuning.subject import Subject
from graphkiln.tuning.trials import Bare, ClosedLoop, Failed, OpenLoop
from graphkiln.tuning.tuner import Progress


@pytest.fixture(scope="module")
def subject(repository: Path) -> Subject:
    return digits_subject(repository)


def test_it_says_what_was_asked_and_found(subject: Subject, tmp_path: Path) -> None:
    found = document(subject, tmp_path)
    assert found["met"]
    assert found["target"]["p99_ms"] == 50
    assert found["chosen"]["configuration"]["engine"] == "openvino"
    assert found["chosen"]["changes"] == "engine=openvino, precision=bf16, spin=off"
    assert found["default"]["changes"] == "as it is served today"
    assert found["promise"]["p99_range_ms"] == pytest.approx([24, 33])
    assert found["promise"]["memory_mb"] == 200
    assert found["space"]["candidates"] < found["space"]["points"]
    assert found["requests"] == "golden samples"
    assert found["load"] == "Poisson arrivals"


def test_it_is_json_without_infinity(subject: Subject, tmp_path: Path) -> None:
    asked = tuning(subject, tmp_path)
    result = finished(asked.spanned.space, asked.target)
    (point,) = result.rows[0].scored.points
    endless = replace(point.measured.latency, p99=Interval(0.1, 0.1, math.inf))
    odd = replace(point, measured=replace(point.measured, latency=endless))
    result = replace(result, promise=odd)
    found = document_of(result, asked, "tune", Costs())
    assert found["promise"]["p99_range_ms"] == [100, None]
    assert json.loads(json.dumps(found, allow_nan=False)) == found


def test_what_bounds_ruled_out_is_counted(subject: Subject, tmp_path: Path) -> None:
    asked = tuning(subject, tmp_path)
    space = asked.spanned.space
    slow = tuple(Exclusion(candidate=each, reason="a run takes 9 ms") for each in space.candidates[:3])
    result = replace(finished(space, asked.target), exclusions=(*space.exclusions[:5], *slow))
    assert document_of(result, asked, "tune", Costs())["refused"] == {"a run takes 9 ms": 3}


def test_what_the_budget_did_not_allow_is_named(subject: Subject, tmp_path: Path) -> None:
    asked = tuning(subject, tmp_path)
    space = asked.spanned.space
    refused = Exclusion(candidate=space.candidates[0], reason="a run takes 9 ms")
    untried = Exclusion(candidate=space.default.with_values({"instances": 2}), reason="no time", by_budget=True)
    result = replace(finished(space, asked.target), exclusions=(refused, untried))
    found = document_of(result, asked, "tune", Costs())
    assert found["untried"] == [{"changes": "instances=2", "reason": "no time"}]


def test_costs_are_told_where_they_can_be_known() -> None:
    assert Costs().of(measured(100, 0.01)) == {}
    assert Costs(price_per_hour=3.6).of(measured(100, 0.01)) == {"price_per_1000": pytest.approx(0.01)}
    found = Costs().of(measured(100, 0.01, energy_j=360.0))
    assert found == {"watt_hours_per_1000": pytest.approx(0.1)}
    assert Costs(price_per_hour=1.0).of(measured(0, 0.01, energy_j=1.0)) == {}


def test_doubtful_measurements_are_counted(subject: Subject, tmp_path: Path) -> None:
    asked = tuning(subject, tmp_path)
    result = finished(asked.spanned.space, asked.target)
    first = result.rows[0]
    point = first.scored.points[0]
    warned = replace(point, measured=replace(point.measured, warning="the load generator took 80% of the cores"))
    rows = (replace(first, scored=replace(first.scored, points=(warned,))), *result.rows[1:])
    found = document_of(replace(result, rows=rows), asked, "tune", Costs())
    assert found["notes"][-1] == "1 of 3 measurements: the load generator took 80% of the cores"


def test_the_largest_share_of_the_generator_is_told(subject: Subject, tmp_path: Path) -> None:
    asked = tuning(subject, tmp_path)
    result = finished(asked.spanned.space, asked.target)
    shares = {60: 1.2, 110: 2.2, 75: 1.5}
    rows = []
    for row, (share, cores) in zip(result.rows, shares.items(), strict=True):
        (point,) = row.scored.points
        said = replace(point.measured, client_cores=cores, warning=f"the load generator took {share}% of the cores")
        rows.append(replace(row, scored=replace(row.scored, points=(replace(point, measured=said),))))
    found = document_of(replace(result, rows=tuple(rows)), asked, "tune", Costs())
    assert found["notes"][-1] == "3 of 3 measurements: the load generator took 110% of the cores"


def test_a_candidate_is_told_by_what_is_different(subject: Subject, tmp_path: Path) -> None:
    default = tuning(subject, tmp_path).spanned.space.default
    assert in_words(default, default) == "as it is served today"
    assert in_words(default.with_values({"instances": 2}), default) == "instances=2"


# What a search found, in 80 columns.


def shown(show: Any, content: Any) -> str:
    console = Console(file=io.StringIO(), width=200)
    show(content, console)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert all(len(line) <= 80 or line.endswith(".jsonl") for line in text.splitlines())
    return " ".join(text.split())


def test_the_answer_comes_first(subject: Subject, tmp_path: Path) -> None:
    text = shown(print_result, document(subject, tmp_path))
    assert text.startswith("digits 1: p99 within 50 ms, best throughput chosen: engine=openvino")
    assert "400 requests per second, p99 30 ms, at most 33 ms at 95%" in text
    assert "2.00 times the throughput (200 requests per second)" in text
    assert "knee: beyond 300 requests per second" in text
    assert "ran: openvino on cpu in bf16" in text
    assert "the load generator took 0.25 cores" in text
    assert "price of 1,000 requests: 0.0025" in text
    assert "note: the machine became slower" in text
    assert "42 measurements in 10.0 minutes, kept in" in text
    assert "compared under load: 7 answers" in text


def test_the_journal_can_be_copied(subject: Subject, tmp_path: Path) -> None:
    found = {**document(subject, tmp_path), "journal": "/a/folder" * 15 + ".jsonl"}
    assert found["journal"] in shown(print_result, found)


def test_each_runner_up_has_a_reason(subject: Subject, tmp_path: Path) -> None:
    text = shown(print_result, document(subject, tmp_path))
    assert "as it is served today: lost: 200 requests per second, the chosen one 400" in text
    assert "max_batch_size=4: lost: <b>slower</b> & worse" in text


def test_where_nothing_meets_the_target_the_closest_is_told(subject: Subject, tmp_path: Path) -> None:
    text = shown(print_result, document(subject, tmp_path, met=False))
    assert "no configuration was proven to meet the target" in text
    assert "closest: max_batch_size=4: 150 requests per second, p99 20 ms" in text
    assert "what limits it: the cores: busy" in text
    assert "the load generator took 0.25 cores" in text


def test_what_met_the_target_and_was_not_proven_is_told_apart(subject: Subject, tmp_path: Path) -> None:
    found = document(subject, tmp_path)
    best = {**found["chosen"], "lost": "measured again, too few requests"}
    told = {**found, "chosen": None, "promise": None, "closest": best, "unproven": True}
    text = shown(print_result, told)
    assert "no configuration was proven to meet the target found, but not proven: engine=openvino" in text
    assert "why it is not proven: measured again, too few requests" in text
    assert "closest" not in text
    untold = shown(print_result, {**told, "closest": {**best, "lost": ""}})
    assert "why it is not proven: the budget was spent before it was measured again" in untold


def test_nothing_at_all_can_be_measured(subject: Subject, tmp_path: Path) -> None:
    found = {**document(subject, tmp_path, met=False), "closest": None, "rows": [], "refused": {"a run takes 9 ms": 4}}
    assert "no candidate could be measured 4 left out: a run takes 9 ms" in shown(print_result, found)


def test_what_was_not_tried_is_counted(subject: Subject, tmp_path: Path) -> None:
    found = document(subject, tmp_path)
    every = found["space"]["candidates"]
    assert "not tried" not in shown(print_result, {**found, "untried": []})
    told = {**found, "untried": [{"changes": "instances=2", "reason": "no time"}]}
    assert f"not tried, for the budget: 1 of {every} candidates" in shown(print_result, told)


def test_more_rows_are_counted(subject: Subject, tmp_path: Path) -> None:
    found = document(subject, tmp_path)
    text = shown(print_result, {**found, "rows": found["rows"] * 3})
    assert "... and 3 more (--json, --html)" in text


def test_the_space_is_shown_with_what_is_left_out(subject: Subject, tmp_path: Path) -> None:
    text = shown(print_space, document(subject, tmp_path)["space"])
    assert "max_batch_size" in text
    assert "on, off" in text
    assert "candidates of" in text
    assert "threads x instances > 2 cores" in text
    assert "not tried: precision int8" in text


# Where marks lie in a picture.


@pytest.fixture
def found(repository: Path, tmp_path: Path) -> dict[str, Any]:
    return document(digits_subject(repository), tmp_path)


def test_every_candidate_is_a_mark_inside_the_picture(found: dict[str, Any]) -> None:
    picture = scatter(found)
    assert picture is not None
    assert [mark["kind"] for mark in picture["marks"]] == ["other", "front", "chosen"]
    for mark in picture["marks"]:
        assert 0 < mark["x"] < WIDTH
        assert 0 < mark["y"] < HEIGHT
    other, front, chosen = picture["marks"]
    assert chosen["x"] > other["x"] > front["x"]
    assert front["y"] > chosen["y"], "a smaller p99 lies lower"
    assert picture["target"] < chosen["y"], "below the target"


def test_a_curve_rises_to_its_end(found: dict[str, Any]) -> None:
    picture = curve(found)
    assert picture is not None
    marks = picture["marks"]
    assert len(marks) == 5
    assert [mark["x"] for mark in marks] == sorted(mark["x"] for mark in marks)
    assert marks[0]["y"] > marks[-1]["y"]
    assert all(mark["low"] > mark["y"] > mark["high"] for mark in marks)
    assert picture["knee"] == marks[2]["x"]


def test_without_points_there_is_no_picture(found: dict[str, Any]) -> None:
    assert curve({**found, "curve": found["curve"][:1]}) is None
    assert scatter({**found, "rows": []}) is None
    endless = {**found["curve"][0], "p99_ms": None}
    assert curve({**found, "curve": [endless, endless]}) is None


# One measurement in one line.

DEFAULT = Candidate.of({"threads": 2, "engine": "a"})
ENDLESS = replace(measured(90, 0.02), latency=replace(measured(90, 0.02).latency, p99=Interval.exact(math.inf)))


@pytest.mark.parametrize(
    ("load", "outcome", "line"),
    [
        (None, Bare(batch_s={1: 0.002}), "threads=1, its session alone: 2 ms"),
        (None, Bare(batch_s={1: 0.002}, accuracy="other"), "threads=1, its session alone: wrong: other"),
        (OpenLoop(100.0), measured(90, 0.02), "threads=1, 100/s: 90/s, p99 20 ms"),
        (OpenLoop(100.0), ENDLESS, "threads=1, 100/s: 90/s, more than 1 in 100 requests failed"),
        (ClosedLoop(4), measured(90, 0.02, warning="busy"), "threads=1, 4 callers: 90/s, p99 20 ms (busy)"),
        (OpenLoop(100.0), Failed(reason="x" * 200), f"threads=1, 100/s: failed: {'x' * 100}..."),
    ],
)
def test_it_says_what_was_measured_and_what_it_did(load: Any, outcome: Any, line: str) -> None:
    progress = Progress(
        number=1, spent_s=12.3, candidate=DEFAULT.with_values({"threads": 1}), load=load, outcome=outcome
    )
    assert line_of(progress, DEFAULT, 60) == f"12 of 60 s: {line}"
