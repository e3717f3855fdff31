"""A report of sections, each with a table, and a chart beside it where one helps."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.resources import files
from typing import Any

import jinja2

# Horizontal charts as numbers for SVG: a row for each thing, its name at the left, its figures at the right.

# Axes: from values to places in a picture, with ticks at round numbers.

_TICKS = (1, 2, 5)
_MARGIN = 0.06  # of an axis, on either side of the outermost marks
_LEAST_DECADES = 0.15  # beside the outermost marks of a logarithmic axis, so that equal values have one, too


@dataclass(frozen=True, kw_only=True, slots=True)
class Axis:
    """From a value to a place in the picture.

    Attributes:
        place: Value -> units.
        ticks: Place and label of each.
    """

    place: Callable[[float], float]
    ticks: tuple[tuple[float, str], ...]


def linear_axis(values: Sequence[float], begin: float, end: float) -> Axis:
    """An axis from 0 to the largest value, with ticks at round numbers.

    Args:
        values: At least one, none below 0.
        begin: Place of 0.
        end: Place a little beyond the largest value.
    """
    most = (max(values) or 1.0) * (1 + _MARGIN)

    def place(value: float) -> float:
        return round(begin + value / most * (end - begin), 1)

    step = _round_step(most / 4)
    ticks = [number * step for number in range(int(most / step) + 1)]
    return Axis(place=place, ticks=tuple((place(tick), f"{tick:g}") for tick in ticks))


def log_axis(values: Iterable[float], begin: float, end: float) -> Axis:
    """A logarithmic axis around values, with ticks at 1, 2, 5, 10, ...

    Args:
        values: At least one, all above 0.
        begin: Place a little below the smallest value.
        end: Place a little above the largest one.
    """
    logs = [math.log10(value) for value in values]
    low, high = min(logs), max(logs)
    margin = max((high - low) * _MARGIN, _LEAST_DECADES)
    low, high = low - margin, high + margin

    def place(value: float) -> float:
        return round(begin + (math.log10(value) - low) / (high - low) * (end - begin), 1)

    powers = range(math.floor(low), math.ceil(high) + 1)
    numbers = [digit * 10.0**power for power in powers for digit in _TICKS]
    return Axis(place=place, ticks=tuple((place(n), f"{n:g}") for n in numbers if low <= math.log10(n) <= high))


def _round_step(step: float) -> float:
    power = 10.0 ** math.floor(math.log10(step))
    return next(digit * power for digit in (1, 2, 5, 10) if digit * power >= step)


WIDTH = 860
_LABELS = 210
_RIGHT = 130
_ROW = 34
_TOP = 10
_FOOT = 34
_THINNEST = 2.0  # units of a bar, so that one without length is seen


@dataclass(frozen=True, kw_only=True, slots=True)
class Bar:
    """A bar.

    Attributes:
        title: Of its row.
        begin: Value at which it begins.
        end: Value at which it ends.
        label: Beside it.
        number: Before the title.
        switch: Draw it pale and thin, beside the others.
        total: After the label; empty for none.
        source: Value of a diamond; None for no diamond.
        source_label: Label of the diamond.
    """

    title: str
    begin: float
    end: float
    label: str
    number: str = ""
    switch: bool = False
    total: str = ""
    source: float | None = None
    source_label: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Span:
    """A line from a full dot to a ring.

    Attributes:
        title: Of its row.
        low: Value of the dot.
        high: Value of the ring.
        label: Beside it.
        number: Before the title.
        switch: Draw it pale.
    """

    title: str
    low: float
    high: float
    label: str
    number: str = ""
    switch: bool = False


def log_across(values: Iterable[float]) -> Axis:
    """A logarithmic axis under the rows; around 1 to 10 where there is no value."""
    return log_axis(list(values) or [1.0, 10.0], _LABELS, WIDTH - _RIGHT)


def linear_across(values: Sequence[float]) -> Axis:
    """An axis from 0 under the rows."""
    return linear_axis(list(values) or [1.0], _LABELS, WIDTH - _RIGHT)


def bar_chart(bars: Sequence[Bar], axis: Axis, unit: str = "") -> dict[str, Any]:
    """Data of the macro `bars`.

    Args:
        bars: From the top down.
        axis: One of those above.
        unit: Behind the labels of its ticks.
    """
    rows = []
    for bar in bars:
        left, right = sorted((axis.place(bar.begin), axis.place(bar.end)))
        source = None if bar.source is None else axis.place(bar.source)
        rows.append({**asdict(bar), "x": left, "width": max(right - left, _THINNEST), "source": source})
    return _chart(rows, axis, unit, "bars")


def span_chart(spans: Sequence[Span], axis: Axis, unit: str = "") -> dict[str, Any]:
    """Data of the macro `spans`; arguments as for `bar_chart`."""
    rows = [{**asdict(span), "low": axis.place(span.low), "high": axis.place(span.high)} for span in spans]
    return _chart(rows, axis, unit, "spans")


def _chart(rows: list[dict[str, Any]], axis: Axis, unit: str, kind: str) -> dict[str, Any]:
    placed = [{**row, "y": _TOP + place * _ROW} for place, row in enumerate(rows)]
    height = _TOP + len(rows) * _ROW + _FOOT
    ticks = [(place, f"{label}{unit}") for place, label in axis.ticks]
    return {"kind": kind, "width": WIDTH, "height": height, "left": _LABELS, "ticks": ticks, "rows": placed}


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
