"""Reports in a real browser: nothing is wider than the window, no text leaves its chart, letters can be read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from browsing import CHROMIUM, browse

from conforming.html_report import to_report
from graphkiln.reporting.report import render

pytestmark = [pytest.mark.slow, pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed")]


@pytest.mark.parametrize("width", [335, 1280])
def test_a_report_is_legible_on_a_phone_and_a_screen(width: int, repository: Path, tmp_path: Path) -> None:
    report = to_report(json.loads((repository / "docs" / "conformance.json").read_text()))
    shown = browse(render(report), tmp_path, width, {"charts": "svg", "tables": "table", "bars": "rect"})
    assert (shown["overflow"], shown["outside"]) == (0, [])
    assert shown["smallest"] >= 10, "letters in a chart, in pixels"
    assert shown["charts"] == shown["tables"] == len(report.sections)
    assert shown["bars"] == sum(len(section.chart["rows"]) for section in report.sections if section.chart)
