"""Runs cover every row once, and a row that comes or goes changes at most two of them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphkiln_backend.scoring.sources.names import cut, find_ends

NAMES = st.lists(st.binary(min_size=1, max_size=8), unique=True, max_size=600)


@given(names=NAMES, rows=st.integers(1, 40))
def test_runs_cover_each_row_once_in_order(names: list[bytes], rows: int) -> None:
    runs = list(cut(names, rows, lambda name: name))
    assert [name for run in runs for name in run] == names
    assert all(runs)


@given(names=NAMES.filter(bool), rows=st.integers(1, 40), data=st.data())
def test_a_row_that_comes_or_goes_changes_at_most_two_runs(names: list[bytes], rows: int, data: st.DataObject) -> None:
    position = data.draw(st.integers(0, len(names) - 1))
    fewer = names[:position] + names[position + 1 :]
    with_it = {tuple(run) for run in cut(names, rows, lambda name: name)}
    without = {tuple(run) for run in cut(fewer, rows, lambda name: name)}
    assert len(with_it - without) <= 2
    assert len(without - with_it) <= 2


@pytest.mark.parametrize("rows", [10, 1000])
def test_runs_of_consecutive_names_are_of_the_length_asked_for(rows: int) -> None:
    ends = np.flatnonzero(find_ends([b"photos/%09d.jpg" % index for index in range(200_000)], rows))
    assert np.diff(ends).mean() == pytest.approx(rows, rel=0.2)
    assert np.diff(ends).max() < 20 * rows


def test_one_row_a_run_ends_everywhere() -> None:
    assert find_ends([b"a", b"b", b""], 1).all()


def test_boundaries_do_not_change_from_release_to_release() -> None:
    """Else every data set would be scored again."""
    assert np.flatnonzero(find_ends([b"%d" % index for index in range(100)], 10)).tolist() == BOUNDARIES


BOUNDARIES = [14, 24, 33, 39, 73, 96]
