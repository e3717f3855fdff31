"""More names than memory holds are sorted like few."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from graphkiln_backend.scoring.sources.places import sort_names

NAMES = st.lists(st.binary(min_size=1, max_size=6).filter(lambda name: b"\0" not in name), max_size=60)


@given(names=NAMES, run=st.integers(1, 20))
def test_names_are_sorted_in_runs_of_any_length(names: list[bytes], run: int) -> None:
    assert list(sort_names(names, run)) == sorted(names)


def test_a_run_that_is_longer_than_a_piece_is_read_as_a_whole() -> None:
    names = [b"%09d" % index for index in range(30_000, 0, -1)]
    assert list(sort_names(names, 10_000)) == sorted(names)
