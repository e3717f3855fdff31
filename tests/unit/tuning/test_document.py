"""The document of a search."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
from digits_subject import digits_subject
from tuned import document, finished, measured, tuning

from graphkiln.tuning.report import Costs, document_of, in_words
from graphkiln.tuning.space import Exclusion
from graphkiln.tuning.statistics import Interval
from graphkiln.tuning.subject import Subject


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
    (point,) = result.rows[0].standing.points
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
    point = first.standing.points[0]
    warned = replace(point, measured=replace(point.measured, warning="the load generator took 80% of the cores"))
    rows = (replace(first, standing=replace(first.standing, points=(warned,))), *result.rows[1:])
    found = document_of(replace(result, rows=rows), asked, "tune", Costs())
    assert found["notes"][-1] == "1 of 3 measurements: the load generator took 80% of the cores"


def test_the_largest_share_of_the_generator_is_told(subject: Subject, tmp_path: Path) -> None:
    asked = tuning(subject, tmp_path)
    result = finished(asked.spanned.space, asked.target)
    shares = {60: 1.2, 110: 2.2, 75: 1.5}
    rows = []
    for row, (share, cores) in zip(result.rows, shares.items(), strict=True):
        (point,) = row.standing.points
        said = replace(point.measured, client_cores=cores, warning=f"the load generator took {share}% of the cores")
        rows.append(replace(row, standing=replace(row.standing, points=(replace(point, measured=said),))))
    found = document_of(replace(result, rows=tuple(rows)), asked, "tune", Costs())
    assert found["notes"][-1] == "3 of 3 measurements: the load generator took 110% of the cores"


def test_a_candidate_is_told_by_what_is_different(subject: Subject, tmp_path: Path) -> None:
    default = tuning(subject, tmp_path).spanned.space.default
    assert in_words(default, default) == "as it is served today"
    assert in_words(default.with_values({"instances": 2}), default) == "instances=2"
