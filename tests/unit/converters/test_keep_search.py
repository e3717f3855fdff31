"""The fewest nodes that must be kept: none of them can be left out, and few tests find them."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphkiln_converters.precision import smallest_kept

NAMES = [f"node{number}" for number in range(16)]


class Needs:
    """Passes when all of some nodes are kept; remembers what it was asked."""

    def __init__(self, *needed: str) -> None:
        self.needed = set(needed)
        self.tried: list[list[str]] = []

    def __call__(self, kept: Sequence[str]) -> bool:
        self.tried.append(list(kept))
        return self.needed <= set(kept)


@given(st.sets(st.sampled_from(NAMES)))
def test_finds_exactly_what_is_needed(needed: set[str]) -> None:
    test = Needs(*needed)
    assert set(smallest_kept(NAMES, test)) == needed


@given(st.sets(st.frozensets(st.sampled_from(NAMES[:6]), min_size=1), min_size=1))
def test_of_several_ways_one_of_which_nothing_can_be_left_out(ways: set[frozenset[str]]) -> None:
    def passes(kept: Sequence[str]) -> bool:
        return any(way <= set(kept) for way in ways)

    found = smallest_kept(NAMES[:6], passes)
    assert passes(found)
    assert not any(passes([name for name in found if name != left_out]) for left_out in found)


def test_nothing_is_kept_where_nothing_must_be() -> None:
    test = Needs()
    assert smallest_kept(NAMES, test) == ()
    assert len(test.tried) == 1


def test_keeping_all_is_not_tested() -> None:
    """That is the fp32 graph, which is proven already."""
    test = Needs(*NAMES)
    assert smallest_kept(NAMES, test) == tuple(NAMES)
    assert all(len(kept) < len(NAMES) for kept in test.tried)


def test_in_the_order_of_the_graph() -> None:
    assert smallest_kept(NAMES, Needs("node9", "node2", "node14")) == ("node2", "node9", "node14")


@pytest.mark.parametrize("needed", NAMES)
def test_one_among_many_is_found_in_logarithmic_time(needed: str) -> None:
    test = Needs(needed)
    smallest_kept(NAMES, test)
    assert len(test.tried) <= 2 * 4 + 2


def test_no_nodes() -> None:
    assert smallest_kept([], Needs("other")) == ()
