"""The JSON document, terminal output and HTML page of a search."""

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
from tuned import document, exact, finished, measured, tuning

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


def test_document_is_json_without_infinity(subject: Subject, tmp_path: Path) -> None:
    asked = tuning(subject, tmp_path)
    result = finished(asked.space, asked.target)
    (point,) = result.rows[0].scored.points
    endless = replace(point.measured.latency, p99=Interval(0.1, 0.1, math.inf))
    odd = replace(point, measured=replace(point.measured, latency=endless))
    result = replace(result, promise=odd)
    found = document_of(result, asked, "tune")
    assert found["promise"]["p99_range_ms"] == [100, None]
    assert json.loads(json.dumps(found, allow_nan=False)) == found


def test_refused_candidates_are_counted(subject: Subject, tmp_path: Path) -> None:
    asked = tuning(subject, tmp_path)
    space = asked.space
    slow = tuple(Exclusion(candidate=each, reason="a run takes 9 ms") for each in space.candidates[:3])
    result = replace(finished(space, asked.target), exclusions=(*space.exclusions[:5], *slow))
    assert document_of(result, asked, "tune")["refused"] == {"a run takes 9 ms": 3}


def test_energy_if_known(subject: Subject, tmp_path: Path) -> None:
    asked = tuning(subject, tmp_path)
    result = finished(asked.space, asked.target)
    point = replace(result.curve[0], measured=measured(100, 0.01, energy_j=360.0))
    found = document_of(replace(result, promise=point), asked, "tune")["promise"]
    assert found["watt_hours_per_1000"] == pytest.approx(0.1)
    found = document_of(result, asked, "tune")["promise"]
    assert "watt_hours_per_1000" not in found


# Terminal output in 80 columns.


def shown(show: Any, content: Any) -> str:
    console = Console(file=io.StringIO(), width=200)
    show(content, console)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert all(len(line) <= 80 or line.endswith(".jsonl") for line in text.splitlines())
    return " ".join(text.split())


def test_printed_result(subject: Subject, tmp_path: Path) -> None:
    text = shown(print_result, document(subject, tmp_path))
    assert text.startswith("digits 1: p99 within 50 ms, best throughput chosen: engine=openvino")
    assert "400 requests per second, p99 30 ms, at most 33 ms at 95%" in text
    assert "2.00 times the throughput (200 requests per second)" in text
    assert "knee: above 300 requests per second" in text
    assert "ran: openvino on cpu in bf16" in text
    assert "the load generator used 0.25 cores" in text
    assert "note: the machine became slower" in text
    assert "42 measurements in 10.0 minutes, recorded in" in text
    assert "answers checked under load: 7" in text


def test_printed_result_without_choice(subject: Subject, tmp_path: Path) -> None:
    text = shown(print_result, document(subject, tmp_path, met=False))

    assert "no configuration was confirmed" in text
    assert "closest: max_batch_size=4: 150 requests per second, p99 20 ms" in text
    assert "bottleneck: the cores: busy" in text
    assert "the load generator used 0.25 cores" in text


def test_printed_result_without_confirmation(subject: Subject, tmp_path: Path) -> None:
    found = document(subject, tmp_path)
    best = {**found["chosen"], "lost": "measured again, too few requests"}

    unproven = {**found, "chosen": None, "promise": None, "closest": best, "unproven": True}

    text = shown(print_result, unproven)

    assert "found, but not confirmed: engine=openvino" in text
    assert "not confirmed because: measured again, too few requests" in text
    assert "closest" not in text

    text = shown(print_result, {**unproven, "closest": {**best, "lost": ""}})

    assert "not confirmed because: the budget was spent" in text


# Progress lines.

DEFAULT = Candidate.of({"threads": 2, "engine": "a"})
ENDLESS = replace(measured(90, 0.02), latency=replace(measured(90, 0.02).latency, p99=exact(math.inf)))


@pytest.mark.parametrize(
    ("load", "outcome", "line"),
    [
        (None, Bare(batch_s={1: 0.002}), "threads=1, session without a server: 2 ms"),
        (None, Bare(batch_s={1: 0.002}, accuracy="other"), "threads=1, session without a server: wrong: other"),
        (OpenLoop(100.0), measured(90, 0.02), "threads=1, 100/s: 90/s, p99 20 ms"),
        (OpenLoop(100.0), ENDLESS, "threads=1, 100/s: 90/s, more than 1 in 100 requests failed"),
        (ClosedLoop(4), measured(90, 0.02, warning="busy"), "threads=1, 4 callers: 90/s, p99 20 ms (busy)"),
        (OpenLoop(100.0), Failed(reason="x" * 200), f"threads=1, 100/s: failed: {'x' * 100}..."),
    ],
)
def test_progress_line(load: Any, outcome: Any, line: str) -> None:
    progress = Progress(
        number=1, spent_s=12.3, candidate=DEFAULT.with_values({"threads": 1}), load=load, outcome=outcome
    )
    assert line_of(progress, DEFAULT, 60) == f"12 of 60 s: {line}"


# The HTML page.


class Tags(HTMLParser):
    """Parser that collects tags and links."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.names: list[str] = []
        self.links: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.names.append(tag)
        self.links += [value or "" for name, value in attrs if name in ("src", "href")]


def test_page_is_self_contained(subject: Subject, tmp_path: Path) -> None:
    tags = Tags(render_page(document(subject, tmp_path)))
    assert tags.links == []
    assert not {"link", "script", "img", "iframe"} & set(tags.names)
    assert tags.names.count("svg") == 2
    assert tags.names.count("circle") == 3 + 5


def test_page_escapes_markup(subject: Subject, tmp_path: Path) -> None:
    page = render_page(document(subject, tmp_path))
    assert "<b>slower" not in page
    assert "&lt;b&gt;slower&lt;/b&gt; &amp; worse" in page


def test_page_without_choice(subject: Subject, tmp_path: Path) -> None:
    page = render_page(document(subject, tmp_path, met=False))
    assert "Closest candidate" in page
    assert "the cores: busy" in page
    assert Tags(page).names.count("svg") == 1


def test_page_has_a_table_of_the_curve(subject: Subject, tmp_path: Path) -> None:
    found = document(subject, tmp_path)
    table = rate_table(found)
    assert [row[0] for row in table.rows] == [f"{point['rate']:.4g}" for point in found["curve"]]
    page = render_page(found)
    assert page.index('id="curve"') < page.index('id="rates"') < page.index('id="rows"')
    assert all(f'<td class="n">{cell}</td>' in page for row in table.rows for cell in row)


def test_document(subject: Subject, tmp_path: Path) -> None:
    found = document(subject, tmp_path)
    assert found["met"]
    assert found["target"]["p99_ms"] == 50
    assert found["chosen"]["configuration"]["engine"] == "openvino"
    assert found["chosen"]["changes"] == "engine=openvino, precision=bf16, spin=off"
    assert found["default"]["changes"] == "as served today"
    assert found["promise"]["p99_range_ms"] == pytest.approx([24, 33])
    assert found["promise"]["memory_mb"] == 200
    assert found["space"]["candidates"] < found["space"]["points"]
    assert found["requests"] == "golden samples"
    assert found["load"] == "Poisson arrivals"


def test_untried_candidates_are_listed(subject: Subject, tmp_path: Path) -> None:
    asked = tuning(subject, tmp_path)
    space = asked.space
    refused = Exclusion(candidate=space.candidates[0], reason="a run takes 9 ms")
    untried = Exclusion(candidate=space.default.with_values({"instances": 2}), reason="no time", by_budget=True)
    result = replace(finished(space, asked.target), exclusions=(refused, untried))
    found = document_of(result, asked, "tune")
    assert found["untried"] == [{"changes": "instances=2", "reason": "no time"}]


def test_page_shows_the_choice(subject: Subject, tmp_path: Path) -> None:
    page = render_page(document(subject, tmp_path))
    assert "400 requests per second" in page
    assert "at most 33 ms at 95%" in page
    assert "200 requests per second, the chosen one 400" in page
    assert "above 300 requests per second" in page
    assert "the machine became slower" in page
    assert "graphkiln tune models/digits --p99 50ms" in page
