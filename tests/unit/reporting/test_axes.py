"""Axes and their ticks."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from graphkiln.reporting.charts import linear_axis, log_axis


def test_a_linear_axis_begins_at_0() -> None:
    axis = linear_axis([100.0, 380.0], 50, 450)
    assert axis.place(0) == 50
    assert 400 < axis.place(380) < 450
    assert [label for _, label in axis.ticks] == ["0", "200", "400"]
    assert linear_axis([0.0], 0, 1).place(0) == 0


def test_a_logarithmic_axis_has_round_ticks() -> None:
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


@given(st.lists(st.just(0.0) | st.floats(1e-6, 1e9), min_size=1))
def test_everything_lies_on_a_linear_axis(values: list[float]) -> None:
    axis = linear_axis(values, 210, 730)
    assert all(210 <= axis.place(value) <= 730 for value in values)
    assert all(210 <= place <= 730 for place, _ in axis.ticks)
