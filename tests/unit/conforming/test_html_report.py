"""A kept run as a page."""

from __future__ import annotations

import json
from pathlib import Path

from conforming.html_report import to_report
from graphkiln.reporting.report import render


def test_the_kept_run_is_a_page_with_a_table_for_each_chart(repository: Path) -> None:
    document = json.loads((repository / "docs" / "conformance.json").read_text())
    report = to_report(document)
    outcomes, *reasons = report.sections
    assert [row[0] for row in outcomes.table.rows] == list(document["ways"])
    assert [int(row[3]) for row in outcomes.table.rows] == [way["passes"] for way in document["ways"].values()]
    assert all(int(row[2]) == sum(map(int, row[3:])) for row in outcomes.table.rows), (
        "all that was asked came to something"
    )
    for section in reasons:
        way = document["ways"][section.name]
        assert sum(int(row[2]) for row in section.table.rows) == way["asked"] - way["passes"]
    page = render(report)
    assert page.count("<svg") == len(report.sections) == page.count("<table")
