"""The page: one file, with what was found in it."""

from __future__ import annotations

from html.parser import HTMLParser
from pathlib import Path

import pytest
from digits_subject import digits_subject
from tuned import document

from graphkiln.tuning.report import rate_table, render_page
from graphkiln.tuning.subject import Subject


@pytest.fixture(scope="module")
def subject(repository: Path) -> Subject:
    return digits_subject(repository)


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


def test_it_says_what_was_chosen_and_why_others_lost(subject: Subject, tmp_path: Path) -> None:
    page = render_page(document(subject, tmp_path))
    assert "400 requests per second" in page
    assert "at most 33 ms at 95%" in page
    assert "200 requests per second, the chosen one 400" in page
    assert "beyond 300 requests per second" in page
    assert "the machine became slower" in page
    assert "graphkiln tune models/digits --p99 50ms" in page
    assert "price of 1,000" in page


def test_what_was_not_tried_is_a_table(subject: Subject, tmp_path: Path) -> None:
    found = document(subject, tmp_path)
    assert 'id="untried"' not in render_page({**found, "untried": []})
    page = render_page({**found, "untried": [{"changes": "instances=2", "reason": "no time"}]})
    assert '<td class="words">instances=2</td><td class="words" data-label="why">no time</td>' in page


def test_what_comes_from_outside_is_text(subject: Subject, tmp_path: Path) -> None:
    page = render_page(document(subject, tmp_path))
    assert "<b>slower" not in page
    assert "&lt;b&gt;slower&lt;/b&gt; &amp; worse" in page


def test_where_nothing_meets_the_target_it_says_what_comes_closest(subject: Subject, tmp_path: Path) -> None:
    page = render_page(document(subject, tmp_path, met=False, price=None))
    assert "no configuration was proven to meet the target" in page
    assert "What comes closest" in page
    assert "the cores: busy" in page
    assert "price of 1,000" not in page
    assert Tags(page).names.count("svg") == 1


def test_what_met_the_target_and_was_not_proven_is_told_apart(subject: Subject, tmp_path: Path) -> None:
    found = document(subject, tmp_path, price=None)
    best = {**found["chosen"], "lost": "measured again, too few requests"}
    page = render_page({**found, "met": False, "chosen": None, "promise": None, "closest": best, "unproven": True})
    assert "The best that was found, not proven" in page
    assert "<dt>why it is not proven</dt><dd>measured again, too few requests</dd>" in page
    assert "What comes closest" not in page


def test_the_curve_has_its_figures_in_a_table(subject: Subject, tmp_path: Path) -> None:
    found = document(subject, tmp_path)
    table = rate_table(found)
    assert [row[0] for row in table.rows] == [f"{point['rate']:.4g}" for point in found["curve"]]
    page = render_page(found)
    assert page.index('id="curve"') < page.index('id="rates"') < page.index('id="rows"')
    assert all(f'<td class="n">{cell}</td>' in page for row in table.rows for cell in row)
