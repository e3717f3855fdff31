"""The document of a search."""

from __future__ import annotations

import io
import json
import math
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from digits_subject import digits_subject
from rich.console import Console
from tuned import document, finished, measured, tuning

from graphkiln.tuning.candidate import Candidate
from graphkiln.tuning.journal import Progress
from graphkiln.tuning.report import (
    document_of,
    line_of,
    print_result,
    rate_table,
    render_page,
)
from graphkiln.tuning.space import Exclusion
from graphkiln.tuning.statistics import Interval
from graphkiln.tuning.subject import Subject
from graphkiln.tuning.trials import Bare, ClosedLoop, Failed, OpenLoop


@pytest.fixture(scope="module")
def subject(repository: Path) -> Subject:
    return digits_subject(repository)


def test_it_is_json_without_infinity(subject: Subject, tmp_path: Path) -> None:
    asked = tuning(subject, tmp_path)
    result = finished(asked.space, asked.target)
    (point,) = result.rows[0].scored.points
    endless = replace(point.measured.latency, p99=Interval(0.1, 0.1, math.inf))
    odd = replace(point, measured=replace(point.measured, latency=endless))
    result = replace(result, promise=odd)
    found = document_of(result, asked, "tune")
    assert found["promise"]["p99_range_ms"] == [100, None]
    assert json.loads(json.dumps(found, allow_nan=False)) == found


def test_what_bounds_ruled_out_is_counted(subject: Subject, tmp_path: Path) -> None:
    asked = tuning(subject, tmp_path)
    space = asked.space
    slow = tuple(Exclusion(candidate=each, reason="a run takes 9 ms") for each in space.candidates[:3])
    result = replace(finished(space, asked.target), exclusions=(*space.exclusions[:5], *slow))
    assert document_of(result, asked, "tune")["refused"] == {"a run takes 9 ms": 3}


def test_energy_is_in_it_if_it_can_be_known(subject: Subject, tmp_path: Path) -> None:
    asked = tuning(subject, tmp_path)
    result = finished(asked.space, asked.target)
    point = replace(result.curve[0], measured=measured(100, 0.01, energy_j=360.0))
    found = document_of(replace(result, promise=point), asked, "tune")["promise"]
    assert found["watt_hours_per_1000"] == pytest.approx(0.1)
    found = document_of(result, asked, "tune")["promise"]
    assert "watt_hours_per_1000" not in found


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
    assert "note: the machine became slower" in text
    assert "42 measurements in 10.0 minutes, kept in" in text
    assert "compared under load: 7 answers" in text


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


# Where marks lie in a picture.


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


# The page: one file, with what was found in it.


class Tags(HTMLParser):
    """Counts tags, and collects what they point to."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.names: list[str] = []
        self.links: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.names.append(tag)
        self.links += [value or "" for name, value in attrs if name in ("src", "href")]


def test_the_page_needs_nothing_else(subject: Subject, tmp_path: Path) -> None:
    tags = Tags(render_page(document(subject, tmp_path)))
    assert tags.links == []
    assert not {"link", "script", "img", "iframe"} & set(tags.names)
    assert tags.names.count("svg") == 2
    assert tags.names.count("circle") == 3 + 5


def test_what_comes_from_outside_is_text(subject: Subject, tmp_path: Path) -> None:
    page = render_page(document(subject, tmp_path))
    assert "<b>slower" not in page
    assert "&lt;b&gt;slower&lt;/b&gt; &amp; worse" in page


def test_where_nothing_meets_the_target_it_says_what_comes_closest(subject: Subject, tmp_path: Path) -> None:
    page = render_page(document(subject, tmp_path, met=False))
    assert "no configuration was proven to meet the target" in page
    assert "What comes closest" in page
    assert "the cores: busy" in page
    assert Tags(page).names.count("svg") == 1


def test_the_curve_has_its_figures_in_a_table(subject: Subject, tmp_path: Path) -> None:
    found = document(subject, tmp_path)
    table = rate_table(found)
    assert [row[0] for row in table.rows] == [f"{point['rate']:.4g}" for point in found["curve"]]
    page = render_page(found)
    assert page.index('id="curve"') < page.index('id="rates"') < page.index('id="rows"')
    assert all(f'<td class="n">{cell}</td>' in page for row in table.rows for cell in row)


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


def test_what_the_budget_did_not_allow_is_named(subject: Subject, tmp_path: Path) -> None:
    asked = tuning(subject, tmp_path)
    space = asked.space
    refused = Exclusion(candidate=space.candidates[0], reason="a run takes 9 ms")
    untried = Exclusion(candidate=space.default.with_values({"instances": 2}), reason="no time", by_budget=True)
    result = replace(finished(space, asked.target), exclusions=(refused, untried))
    found = document_of(result, asked, "tune")
    assert found["untried"] == [{"changes": "instances=2", "reason": "no time"}]


def test_it_says_what_was_chosen_and_why_others_lost(subject: Subject, tmp_path: Path) -> None:
    page = render_page(document(subject, tmp_path))
    assert "400 requests per second" in page
    assert "at most 33 ms at 95%" in page
    assert "200 requests per second, the chosen one 400" in page
    assert "beyond 300 requests per second" in page
    assert "the machine became slower" in page
    assert "graphkiln tune models/digits --p99 50ms" in page
