"""HTML reports of sections with tables, and the geometry of their SVG charts: one row per item, one axis."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.resources import files
from typing import Any

import jinja2

_TICKS = (1, 2, 5)
_MARGIN = 0.06  # share of an axis beyond the outermost marks
_MIN_DECADES = 0.15  # minimum margin of a logarithmic axis, needed if all values are equal


@dataclass(frozen=True, kw_only=True, slots=True)
class Axis:
    """An axis of a chart.

    Attributes:
        place: Maps a value to a position.
        ticks: Position and label of each tick.
    """

    place: Callable[[float], float]
    ticks: tuple[tuple[float, str], ...]


def linear_axis(values: Sequence[float], begin: float, end: float) -> Axis:
    """Create an axis from 0 with ticks at round numbers.

    Args:
        values: At least one value; none is negative.
        begin: Position of 0.
        end: Position slightly beyond the largest value.
    """
    most = (max(values) or 1.0) * (1 + _MARGIN)

    def place(value: float) -> float:
        return round(begin + value / most * (end - begin), 1)

    step = _round_step(most / 4)
    ticks = [number * step for number in range(int(most / step) + 1)]
    return Axis(place=place, ticks=tuple((place(tick), f"{tick:g}") for tick in ticks))


def log_axis(values: Iterable[float], begin: float, end: float) -> Axis:
    """Create a logarithmic axis with ticks at 1, 2, 5, 10, ...

    Args:
        values: At least one value; all are positive.
        begin: Position slightly below the smallest value.
        end: Position slightly above the largest value.
    """
    logs = [math.log10(value) for value in values]
    low, high = min(logs), max(logs)
    margin = max((high - low) * _MARGIN, _MIN_DECADES)
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
_MIN_WIDTH = 2.0  # keeps bars without length visible


@dataclass(frozen=True, kw_only=True, slots=True)
class Bar:
    """A row with a bar.

    Attributes:
        begin: Value at the start of the bar.
        end: Value at the end of the bar.
        switch: Draw the bar pale and thin.
        total: Text after the label; empty for none.
        source: Value of a diamond; None for no diamond.
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
    """A row with a line from a dot to a ring.

    Attributes:
        low: Value of the dot.
        high: Value of the ring.
        switch: Draw the line pale.
    """

    title: str
    low: float
    high: float
    label: str
    number: str = ""
    switch: bool = False


def log_across(values: Iterable[float]) -> Axis:
    """Create a logarithmic axis below the rows; from 1 to 10 without values."""
    return log_axis(list(values) or [1.0, 10.0], _LABELS, WIDTH - _RIGHT)


def linear_across(values: Sequence[float]) -> Axis:
    """Create an axis from 0 below the rows."""
    return linear_axis(list(values) or [1.0], _LABELS, WIDTH - _RIGHT)


def bar_chart(bars: Sequence[Bar], axis: Axis, unit: str = "") -> dict[str, Any]:
    """Compute the data of the macro `bars`; `unit` is appended to the tick labels."""
    rows = []
    for bar in bars:
        left, right = sorted((axis.place(bar.begin), axis.place(bar.end)))
        source = None if bar.source is None else axis.place(bar.source)
        rows.append({**asdict(bar), "x": left, "width": max(right - left, _MIN_WIDTH), "source": source})
    return _chart(rows, axis, unit, "bars")


def span_chart(spans: Sequence[Span], axis: Axis) -> dict[str, Any]:
    """Compute the data of the macro `spans`."""
    rows = [{**asdict(span), "low": axis.place(span.low), "high": axis.place(span.high)} for span in spans]
    return _chart(rows, axis, "", "spans")


def _chart(rows: list[dict[str, Any]], axis: Axis, unit: str, kind: str) -> dict[str, Any]:
    placed = [{**row, "y": _TOP + place * _ROW} for place, row in enumerate(rows)]
    height = _TOP + len(rows) * _ROW + _FOOT
    ticks = [(place, f"{label}{unit}") for place, label in axis.ticks]
    return {"kind": kind, "width": WIDTH, "height": height, "left": _LABELS, "ticks": ticks, "rows": placed}


_HERE = "graphkiln.reporting"


def environment(room: str = _HERE) -> jinja2.Environment:
    """Create a template environment that escapes text and rejects undefined names.

    Args:
        room: Package that is searched for templates before this one.
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
    """A table of formatted cells.

    Attributes:
        texts: Number of leading text columns; the others are aligned to the right.
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
    """A section of a report.

    Attributes:
        name: Prefix of HTML ids.
        chart: Chart of the figures from `bar_chart` or `span_chart`, or None.
    """

    name: str
    title: str
    text: str
    table: Table
    chart: Mapping[str, Any] | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """A report on one page.

    Attributes:
        about: Subtitle: subject, machine and time.
        facts: Values by name, shown at the end.
        command: Command that repeats the measurement, or empty.
    """

    title: str
    about: str
    sections: Sequence[Section]
    facts: Mapping[str, str] = field(default_factory=dict)
    command: str = ""


def render(report: Report) -> str:
    """Render a report as one self-contained HTML file."""
    return environment().get_template("report.html.j2").render(report=report)
