"""Horizontal charts as numbers for SVG: a row for each thing, its name at the left, its figures at the right."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from graphkiln.reporting.axes import Axis, linear_axis, log_axis

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
        switch: Whether it is drawn pale and thin, beside the others.
        total: After the label; empty for none.
        source: Value at which a diamond stands; None for none.
        source_label: What the diamond says.
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
        switch: Whether it is drawn pale.
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
    """Bars as the macro `bars` draws them.

    Args:
        bars: From the top down.
        axis: One of those above.
        unit: Behind the labels of its ticks.
    """
    return _chart([_placed(bar, axis) for bar in bars], axis, unit, "bars")


def span_chart(spans: Sequence[Span], axis: Axis, unit: str = "") -> dict[str, Any]:
    """Spans as the macro `spans` draws them.

    Args:
        spans: From the top down.
        axis: One of those above.
        unit: Behind the labels of its ticks.
    """
    rows = [
        {
            "title": span.title,
            "number": span.number,
            "switch": span.switch,
            "label": span.label,
            "low": axis.place(span.low),
            "high": axis.place(span.high),
        }
        for span in spans
    ]
    return _chart(rows, axis, unit, "spans")


def _placed(bar: Bar, axis: Axis) -> dict[str, Any]:
    left, right = sorted((axis.place(bar.begin), axis.place(bar.end)))
    return {
        "title": bar.title,
        "number": bar.number,
        "switch": bar.switch,
        "label": bar.label,
        "total": bar.total,
        "x": left,
        "width": max(right - left, _THINNEST),
        "source": None if bar.source is None else axis.place(bar.source),
        "source_label": bar.source_label,
    }


def _chart(rows: list[dict[str, Any]], axis: Axis, unit: str, kind: str) -> dict[str, Any]:
    placed = [{**row, "y": _TOP + place * _ROW} for place, row in enumerate(rows)]
    height = _TOP + len(rows) * _ROW + _FOOT
    ticks = [(place, f"{label}{unit}") for place, label in axis.ticks]
    return {"kind": kind, "width": WIDTH, "height": height, "left": _LABELS, "ticks": ticks, "rows": placed}
