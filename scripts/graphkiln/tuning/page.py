"""What a search found as one self-contained HTML file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from graphkiln.reporting.report import Table
from graphkiln.reporting.templates import environment
from graphkiln.tuning.candidate import format_value
from graphkiln.tuning.plots import curve, curve_points, scatter


def render_page(document: Mapping[str, Any]) -> str:
    """Renders a document.

    Args:
        document: As `document_of` makes it.
    """
    templates = environment(__package__ or "")
    templates.filters["number"] = _number
    templates.filters["word"] = format_value
    template = templates.get_template("page.html.j2")
    return template.render(**document, scatter=scatter(document), plot=curve(document), rates=rate_table(document))


def rate_table(document: Mapping[str, Any]) -> Table:
    """The figures of the curve: a row for each rate.

    Args:
        document: As `document_of` makes it.
    """
    columns = ("requests per s", "responses per s", "p50 ms", "p99 ms", "p99 at least", "at most, at 95%")
    rows = [
        [_number(value) for value in (p["rate"], p["throughput"], p["p50_ms"], p["p99_ms"], *p["p99_range_ms"])]
        for p in curve_points(document)
    ]
    return Table(columns=columns, rows=rows, texts=0)


def _number(value: float | None, digits: int = 4) -> str:
    return "\N{EN DASH}" if value is None else f"{value:.{digits}g}"
