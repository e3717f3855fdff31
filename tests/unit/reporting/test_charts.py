"""Where bars and spans lie."""

from __future__ import annotations

import pytest

from graphkiln.reporting.charts import WIDTH, Bar, Span, bar_chart, linear_across, log_across, span_chart


def test_bars_lie_below_each_other_and_keep_what_is_said_of_them() -> None:
    bars = [
        Bar(title="one", begin=0, end=10, label="10", number="1"),
        Bar(title="two", begin=10, end=5, label="-5", switch=True, source=7.5, source_label="told"),
    ]
    chart = bar_chart(bars, linear_across([10.0]), " ms")
    one, two = chart["rows"]
    assert one["x"] == chart["left"]
    assert two["x"] + two["width"] == pytest.approx(one["x"] + one["width"])
    assert two["x"] < two["source"] < two["x"] + two["width"]
    assert one["source"] is None
    assert (two["switch"], two["source_label"], one["number"]) == (True, "told", "1")
    assert one["y"] < two["y"] < chart["height"]
    assert all(label.endswith(" ms") for _, label in chart["ticks"])


def test_a_bar_without_length_is_seen() -> None:
    (bar,) = bar_chart([Bar(title="none", begin=0, end=0, label="0")], linear_across([0.0]))["rows"]
    assert bar["width"] == 2


def test_spans_go_from_low_to_high() -> None:
    chart = span_chart([Span(title="a", low=1, high=100, label="1 / 100")], log_across([1.0, 100.0]))
    (row,) = chart["rows"]
    assert chart["left"] < row["low"] < row["high"] < WIDTH
    assert chart["kind"] == "spans"


def test_nothing_is_an_empty_chart() -> None:
    assert bar_chart([], log_across([]))["rows"] == []
    assert span_chart([], linear_across([]))["rows"] == []
