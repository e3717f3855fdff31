"""HTML reports: a table for each chart, escaped text, no external resources."""

from __future__ import annotations

import re

import jinja2
import pytest

from graphkiln.reporting.report import (
    Bar,
    Report,
    Section,
    Span,
    Table,
    bar_chart,
    environment,
    linear_across,
    log_across,
    render,
    span_chart,
)

TABLE = Table(columns=("what", "per s"), rows=[("<b>one</b>", "10"), ("two", "20")])
BARS = bar_chart([Bar(title="<i>", begin=0, end=10, label="10")], linear_across([10.0]))
SPANS = span_chart([Span(title="two", low=1, high=2, label="1 / 2")], log_across([1.0, 2.0]))


def report(**changes: object) -> Report:
    sections = [
        Section(name="rates", title="Rates", text="How many.", table=TABLE, chart=BARS),
        Section(name="times", title="Times", text="How long.", table=TABLE, chart=SPANS),
        Section(name="plain", title="Plain", text="", table=TABLE),
    ]
    usual = {"title": "A & B", "about": "here", "sections": sections, "facts": {"machine": "one"}, "command": "do it"}
    return Report(**{**usual, **changes})  # type: ignore[arg-type]


def test_every_chart_has_its_table() -> None:
    page = render(report())
    for name in ("rates", "times"):
        assert page.index(f'id="{name}-chart"') < page.index(f'<table id="{name}" class')
    assert page.count("<svg") == 2
    assert page.count("<table") == 3
    assert page.count("<rect") == 1
    assert page.count("<circle") == 2


def test_text_is_escaped() -> None:
    page = render(report())
    assert "<h1>A &amp; B</h1>" in page
    assert "<td>&lt;b&gt;one&lt;/b&gt;</td>" in page
    assert "<b>" not in page
    assert "<i>" not in page


def test_no_external_resources() -> None:
    assert not re.search(r"(?:src|href|url)\s*[=(]|@import|https?://|<script", render(report()))


def test_numbers_are_aligned_to_the_right() -> None:
    page = render(report())
    assert '<th scope="col" class="n">per s</th>' in page
    assert '<td class="n">20</td>' in page


def test_no_headings_without_facts_and_command() -> None:
    page = render(report(facts={}, command=""))
    assert "Machine and versions" not in page
    assert "To repeat it" not in page


def test_row_of_another_length_is_refused() -> None:
    with pytest.raises(ValueError, match="a row of 1 cells"):
        Table(columns=("a", "b"), rows=[("x",)])


def test_column_without_a_title_is_refused() -> None:
    with pytest.raises(ValueError, match="a column without a title"):
        Table(columns=("", "b"), rows=[("x", "y")])


# Templates: those of a package precede the shared ones.


def test_packages_extend_the_shared_page() -> None:
    templates = environment("graphkiln.tuning")
    templates.filters["number"] = templates.filters["word"] = str
    text = templates.loader.get_source(templates, "page.html.j2")[0]  # type: ignore[union-attr]
    assert text.startswith('{% extends "base.html.j2" %}')
    assert "<style>" not in text
    assert templates.get_template("base.html.j2")


def test_missing_value_is_an_error() -> None:
    with pytest.raises(jinja2.UndefinedError):
        environment().from_string("{{ nothing }}").render()
