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
from rich.console import Console
from tuned import document, exact, finished, measured, tuning

from graphkiln.tuning.candidate import Candidate
from graphkiln.tuning.journal import Progress
from graphkiln.tuning.report import document_of, line_of, print_result, render_page
from graphkiln.tuning.result import Result
from graphkiln.tuning.space import Exclusion
from graphkiln.tuning.statistics import Interval
from graphkiln.tuning.subject import Subject
from graphkiln.tuning.trials import ClosedLoop, Failed, OpenLoop, SessionTiming
from graphkiln.tuning.tuner import Tuning


@pytest.fixture
def search(subject: Subject, tmp_path: Path) -> Tuning:
    return tuning(subject, tmp_path)


@pytest.fixture
def result(search: Tuning) -> Result:
    return finished(search.space, search.target)


@pytest.fixture
def met(subject: Subject, tmp_path: Path) -> dict[str, Any]:
    return document(subject, tmp_path)


@pytest.fixture
def missed(subject: Subject, tmp_path: Path) -> dict[str, Any]:
    return document(subject, tmp_path, met=False)


def test_document(met: dict[str, Any]) -> None:
    assert met["met"]
    assert met["target"]["p99_ms"] == 50
    assert met["chosen"]["configuration"]["engine"] == "openvino"
    assert met["chosen"]["changes"] == "engine=openvino, precision=bf16, spin=off"
    assert met["default"]["changes"] == "as served today"
    assert met["promise"]["p99_range_ms"] == pytest.approx([24, 33])
    assert met["promise"]["memory_mb"] == 200
    assert "watt_hours_per_1000" not in met["promise"]
    assert met["space"]["candidates"] < met["space"]["points"]
    assert met["requests"] == "golden samples"
    assert met["load"] == "Poisson arrivals"


def test_document_has_no_infinity_and_energy_if_known(search: Tuning, result: Result) -> None:
    endless = replace(measured(100, 0.01).latency, p99=Interval(0.1, 0.1, math.inf))
    promise = replace(result.curve[0], measured=measured(100, 0.01, energy_j=360.0, latency=endless))
    found = document_of(replace(result, promise=promise), search, "tune")
    assert found["promise"]["p99_range_ms"] == [100, None]
    assert found["promise"]["watt_hours_per_1000"] == pytest.approx(0.1)
    assert json.loads(json.dumps(found, allow_nan=False)) == found


def test_refused_candidates_are_counted_and_untried_ones_listed(search: Tuning, result: Result) -> None:
    space = search.space
    slow = tuple(Exclusion(candidate=each, reason="a run takes 9 ms") for each in space.candidates[:3])
    untried = Exclusion(candidate=space.default.with_values({"instances": 2}), reason="no time", by_budget=True)
    result = replace(result, exclusions=(*space.exclusions[:5], *slow, untried))
    found = document_of(result, search, "tune")
    assert found["refused"]["a run takes 9 ms"] == 3
    assert found["untried"] == [{"changes": "instances=2", "reason": "no time"}]


# Terminal output in 80 columns.


def printed(document: dict[str, Any]) -> str:
    console = Console(file=io.StringIO(), width=200)
    print_result(document, console)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert all(len(line) <= 80 or line.endswith(".jsonl") for line in text.splitlines())
    return " ".join(text.split())


def test_printed_result(met: dict[str, Any]) -> None:
    text = printed(met)
    assert text.startswith("digits 1: p99 within 50 ms, best throughput chosen: engine=openvino")
    assert "400 requests per second, p99 30 ms, at most 33 ms at 95%" in text
    assert "2.00 times the throughput (200 requests per second)" in text
    assert "knee: above 300 requests per second" in text
    assert "ran: openvino on cpu in bf16" in text
    assert "the load generator used 0.25 cores" in text
    assert "note: the machine became slower" in text
    assert "42 measurements in 10.0 minutes, recorded in" in text
    assert "answers checked under load: 7" in text


def test_printed_result_without_choice(missed: dict[str, Any]) -> None:
    text = printed(missed)
    assert "no configuration was confirmed" in text
    assert "closest: max_batch_size=4: 150 requests per second, p99 20 ms" in text
    assert "bottleneck: the cores: busy" in text


@pytest.mark.parametrize(
    ("lost", "reason"), [("measured again, too few requests", "measured again"), ("", "the budget was spent")]
)
def test_printed_result_without_confirmation(met: dict[str, Any], lost: str, reason: str) -> None:
    best = {**met["chosen"], "lost": lost}
    text = printed({**met, "chosen": None, "promise": None, "closest": best, "unproven": True})
    assert "found, but not confirmed: engine=openvino" in text
    assert f"not confirmed because: {reason}" in text
    assert "closest" not in text


# Progress lines.

DEFAULT = Candidate.of({"threads": 2, "engine": "a"})
ENDLESS = replace(measured(90, 0.02), latency=replace(measured(90, 0.02).latency, p99=exact(math.inf)))


@pytest.mark.parametrize(
    ("load", "outcome", "line"),
    [
        (None, SessionTiming(batch_s={1: 0.002}), "threads=1, session without a server: 2 ms"),
        (
            None,
            SessionTiming(batch_s={1: 0.002}, accuracy="other"),
            "threads=1, session without a server: wrong: other",
        ),
        (
            OpenLoop(100.0),
            ENDLESS,
            "threads=1, 100/s: 90/s, more than 1 in 100 of 1000 requests failed or were not sent in time",
        ),
        (ClosedLoop(4), measured(90, 0.02, warning="busy"), "threads=1, 4 callers: 90/s, p99 20 ms (busy)"),
        (OpenLoop(100.0), Failed(reason="x" * 200), f"threads=1, 100/s: failed: {'x' * 100}..."),
    ],
)
def test_progress_line(load: Any, outcome: Any, line: str) -> None:
    candidate = DEFAULT.with_values({"threads": 1})
    progress = Progress(spent_s=12.3, candidate=candidate, load=load, outcome=outcome)
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


def test_page_is_self_contained(met: dict[str, Any]) -> None:
    tags = Tags(render_page(met))
    assert tags.links == []
    assert not {"link", "script", "img", "iframe"} & set(tags.names)
    assert tags.names.count("svg") == 2
    assert tags.names.count("circle") == 3 + 5


def test_page_shows_the_choice_and_its_curve(met: dict[str, Any]) -> None:
    page = render_page(met)
    assert "400 requests per second" in page
    assert "at most 33 ms at 95%" in page
    assert "200 requests per second, the chosen one 400" in page
    assert "above 300 requests per second" in page
    assert "the machine became slower" in page
    assert "graphkiln tune models/digits --p99 50ms" in page
    assert page.index('id="curve"') < page.index('id="rates"') < page.index('id="rows"')
    rates = page[page.index('id="rates"') : page.index('id="rows"')]
    assert all(f'<td class="n">{point["rate"]:.4g}</td>' in rates for point in met["curve"])
    assert "<b>slower" not in page
    assert "&lt;b&gt;slower&lt;/b&gt; &amp; worse" in page


def test_page_without_choice(missed: dict[str, Any]) -> None:
    page = render_page(missed)
    assert "Closest candidate" in page
    assert "the cores: busy" in page
    assert Tags(page).names.count("svg") == 1
