"""Columns are checked before anything is read."""

from __future__ import annotations

import pytest

from graphkiln_backend.scoring.errors import ScoringError
from graphkiln_backend.scoring.sources.base import Columns


@pytest.mark.parametrize("columns", [Columns(image="a"), Columns(id="a"), Columns(kept=("a",))])
def test_columns_are_refused_where_there_are_none(columns: Columns) -> None:
    Columns().refuse("listings")
    with pytest.raises(ScoringError, match="listings have no columns"):
        columns.refuse("listings")


def test_unknown_columns_are_named_beside_those_that_there_are() -> None:
    Columns(image="a", id="b", kept=("b",)).check(["a", "b"], "file")
    with pytest.raises(ScoringError, match=r"file has no column 'c' \(it has a, b\)"):
        Columns(image="a", kept=("c",)).check(["a", "b"], "file")
