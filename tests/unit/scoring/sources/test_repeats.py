"""Ids that occur twice are named."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graphkiln_backend.scoring.errors import ScoringError
from graphkiln_backend.scoring.row_hashes import Repeats


@settings(max_examples=20)
@given(st.lists(st.text(max_size=2), max_size=40))
def test_repeated_ids_are_found_and_no_others(ids: list[str]) -> None:
    with Repeats() as repeats:
        repeats.add(ids[:7])
        repeats.add(ids[7:])
        if len(set(ids)) == len(ids):
            repeats.check(lambda: ids, "")
        else:
            with pytest.raises(ScoringError, match="more than once"):
                repeats.check(lambda: ids, "")


def test_each_is_named_once_with_what_to_do() -> None:
    ids = [b"a.jpg", b"b.jpg", b"a.jpg", b"c.jpg", b"a.jpg"]
    with Repeats() as repeats:
        repeats.add(ids)
        with pytest.raises(ScoringError, match=r"1 id occurs more than once: 'a.jpg' \(mend it\)"):
            repeats.check(lambda: ids, "mend it")


def test_of_many_some_are_named() -> None:
    ids = [*map(str, range(10))] * 2
    with Repeats() as repeats:
        repeats.add(ids)
        with pytest.raises(ScoringError, match=r"10 ids occur more than once: '0', '1', '2', '3', '4', \.\.\."):
            repeats.check(lambda: ids, "")


def test_a_hash_that_two_ids_share_is_no_repetition() -> None:
    with Repeats() as repeats:
        repeats.add(["a", "a"])  # what two ids of one hash look like
        repeats.check(lambda: ["a", "b"], "")
