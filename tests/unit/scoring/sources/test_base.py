"""Names that are no text become text; digests keep values apart."""

from __future__ import annotations

import os

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from graphkiln_backend.scoring.errors import ScoringError
from graphkiln_backend.scoring.sources.base import as_id, checked_text, cut, find_ends

ODD = os.fsdecode(b"caf\xe9.jpg")


def test_bytes_that_are_not_utf8_are_escaped() -> None:
    assert as_id(ODD) == r"caf\xe9.jpg"
    assert as_id("café.jpg") == "café.jpg"


PIECES = st.sampled_from([b"\\", b"x", b"e9", b"\xe9", b"\xc3\xa9", b"\xc3", b".jpg", b"\n"])
NAMES = st.lists(PIECES, max_size=8).map(b"".join)


@settings(max_examples=40, deadline=None)
@given(one=NAMES, other=NAMES)
@example(one=b"\xe9.jpg", other=b"\\xe9.jpg")
@example(one=b"\\\xe9", other=b"\\\\xe9")
def test_two_names_never_have_one_id(one: bytes, other: bytes) -> None:
    assert (as_id(os.fsdecode(one)) == as_id(os.fsdecode(other))) is (one == other)


def test_path_that_is_not_utf8_is_refused() -> None:
    for path in ("/photos", "/photos\\xe9"):
        assert checked_text(path) == path
    with pytest.raises(ScoringError, match=r"caf\\xe9"):
        checked_text(ODD)


# Runs cover every row once, and a row that comes or goes changes at most two of them.

NAMES_OF_CUTS = st.lists(st.binary(min_size=1, max_size=8), unique=True, max_size=600)


@given(names=NAMES_OF_CUTS, rows=st.integers(1, 40))
def test_runs_cover_each_row_once_in_order(names: list[bytes], rows: int) -> None:
    runs = list(cut(names, rows, lambda name: name))
    assert [name for run in runs for name in run] == names
    assert all(runs)


@given(names=NAMES_OF_CUTS.filter(bool), rows=st.integers(1, 40), data=st.data())
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


def test_boundaries_do_not_change_from_release_to_release() -> None:
    """Else every data set would be scored again."""
    assert np.flatnonzero(find_ends([b"%d" % index for index in range(100)], 10)).tolist() == BOUNDARIES


BOUNDARIES = [14, 24, 33, 39, 73, 96]
