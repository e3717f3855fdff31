"""Where marks lie in a picture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from digits_subject import digits_subject
from tuned import document

from graphkiln.tuning.report import HEIGHT, WIDTH, curve, scatter


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
