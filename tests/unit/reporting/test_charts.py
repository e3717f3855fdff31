"""Positions of bars, spans and ticks in charts."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphkiln.reporting.report import (
    Bar,
    bar_chart,
    linear_across,
    linear_axis,
    log_across,
    log_axis,
    span_chart,
)

# Axes and their ticks.


def test_linear_axis_begins_at_0() -> None:
    axis = linear_axis([100.0, 380.0], 50, 450)
    assert axis.place(0) == 50
    assert 400 < axis.place(380) < 450
    assert [label for _, label in axis.ticks] == ["0", "200", "400"]
    assert linear_axis([0.0], 0, 1).place(0) == 0


def test_logarithmic_axis_has_round_ticks() -> None:
    axis = log_axis([3.0, 40.0], 300, 0)
    assert [label for _, label in axis.ticks] == ["5", "10", "20", "50"]
    assert 300 > axis.place(3) > axis.place(40) > 0
    assert log_axis([7.0], 0, 1).place(7) == 0.5


@given(st.lists(st.floats(1e-3, 1e6), min_size=1))
def test_ticks_are_round_numbers_in_order(values: list[float]) -> None:
    axis = log_axis(values, 0, 1000)
    assert [place for place, _ in axis.ticks] == sorted(place for place, _ in axis.ticks)
    assert all(0 <= axis.place(value) <= 1000 for value in values)
    for _, label in axis.ticks:
        assert label.lstrip("0.").rstrip("0")[:1] in ("1", "2", "5") or "e" in label


def test_bars_are_rows_with_labels() -> None:
    bars = [
        Bar(title="one", begin=0, end=10, label="10", number="1"),
        Bar(title="two", begin=10, end=5, label="-5", switch=True, source=7.5, source_label="reported"),
    ]
    chart = bar_chart(bars, linear_across([10.0]), " ms")
    one, two = chart["rows"]
    assert one["x"] == chart["left"]
    assert two["x"] + two["width"] == pytest.approx(one["x"] + one["width"])
    assert two["x"] < two["source"] < two["x"] + two["width"]
    assert one["source"] is None
    assert (two["switch"], two["source_label"], one["number"]) == (True, "reported", "1")
    assert one["y"] < two["y"] < chart["height"]
    assert all(label.endswith(" ms") for _, label in chart["ticks"])


def test_empty_chart() -> None:
    assert bar_chart([], log_across([]))["rows"] == []
    assert span_chart([], linear_across([]))["rows"] == []
