"""A report of sections, each with a table, and a chart beside it where one helps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from typing import Any

import jinja2

_HERE = "graphkiln.reporting"


def environment(room: str = _HERE) -> jinja2.Environment:
    """Template environment with escaped text, which refuses undefined names.

    Args:
        room: Package whose templates go before those of this one.
    """

    def load(name: str) -> str | None:
        places = [files(each) / name for each in dict.fromkeys((room, _HERE))]
        return next((place.read_text("utf-8") for place in places if place.is_file()), None)

    return jinja2.Environment(
        loader=jinja2.FunctionLoader(load),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Table:
    """Figures as text.

    Attributes:
        columns: Their titles.
        rows: As many cells each as there are columns.
        texts: How many of the first columns hold text; the others are numbers, aligned to the right.
    """

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    texts: int = 1

    def __post_init__(self) -> None:
        if not all(self.columns):
            raise ValueError(f"a column without a title, which screen readers need: {self.columns}")
        for row in self.rows:
            if len(row) != len(self.columns):
                raise ValueError(f"a row of {len(row)} cells in a table of {len(self.columns)} columns: {row}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Section:
    """A section of a report. There is no chart without its table.

    Attributes:
        name: For the ids of its parts.
        title: Its heading.
        text: The meaning of the figures.
        table: The figures.
        chart: As `charts.bar_chart` or `charts.span_chart` makes it; None for a table alone.
    """

    name: str
    title: str
    text: str
    table: Table
    chart: Mapping[str, Any] | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """One page.

    Attributes:
        title: Of the page.
        about: Subtitle: subject, place and time.
        sections: In order.
        facts: Name -> value, at the end.
        command: Command that repeats the measurement; may be empty.
    """

    title: str
    about: str
    sections: Sequence[Section]
    facts: Mapping[str, str] = field(default_factory=dict)
    command: str = ""


def render(report: Report) -> str:
    """A report as one self-contained HTML file."""
    return environment().get_template("report.html.j2").render(report=report)
