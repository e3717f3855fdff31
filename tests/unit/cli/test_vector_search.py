"""Exact search, against a reference that adds up one vector after the other."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from graphkiln.cli.vector_search import search
from graphkiln_backend.graph.errors import InvalidInput

RNG = np.random.default_rng(21)


def in_chunks(vectors: Any, rows: int) -> list[Any]:
    names = [str(row) for row in range(len(vectors))]
    return [(names[at : at + rows], vectors[at : at + rows]) for at in range(0, len(vectors), rows)]


def cosine(a: Sequence[float], b: Sequence[float]) -> float:
    """In Python's own numbers, each sum rounded once."""
    return math.fsum(x * y for x, y in zip(a, b, strict=True)) / math.sqrt(
        math.fsum(x * x for x in a) * math.fsum(y * y for y in b)
    )


def reference(vectors: Any, query: Any, top: int) -> list[tuple[str, float]]:
    scores = [cosine(row, query.tolist()) for row in vectors.tolist()]
    order = sorted(range(len(scores)), key=lambda row: (-scores[row], row))
    return [(str(row), scores[row]) for row in order[:top]]


@pytest.mark.parametrize("chunk", [1, 7, 64, 500])
@pytest.mark.parametrize("features", [1, 3, 130])
def test_equals_the_reference(chunk: int, features: int) -> None:
    vectors = RNG.normal(size=(200, features)).astype(np.float32)
    vectors[[5, 90, 199]] = vectors[40]  # equals, in several chunks
    query = vectors[40] + np.float32(0.01)
    found = search(in_chunks(vectors, chunk), query, 20)
    expected = reference(vectors, query, 20)
    np.testing.assert_allclose([each.score for each in found.neighbors], [score for _, score in expected], atol=1e-12)
    if features > 1:  # of one feature, all angles are 0 or 180 degrees
        assert [each.source for each in found.neighbors] == [name for name, _ in expected]
    assert (found.rows, found.skipped) == (200, 0)


@pytest.mark.parametrize("rows", range(2, 40))
def test_equals_stay_in_the_order_of_the_file_wherever_they_stand(rows: int) -> None:
    vectors = np.tile(RNG.normal(size=193).astype(np.float32), (rows, 1))
    query = RNG.normal(size=193).astype(np.float32)
    for chunk in (1, 3, rows):
        found = search(in_chunks(vectors, chunk), query, rows)
        assert [each.source for each in found.neighbors] == [str(row) for row in range(rows)]
        assert len({each.score for each in found.neighbors}) == 1


@pytest.mark.parametrize("scale", [1e-38, 1e-3, 1e38])
def test_lengths_do_not_matter_however_large(scale: float) -> None:
    vectors = np.array([[0.5, 1], [1, 1], [-1, -1]], np.float32) * np.float32(scale)
    found = search(in_chunks(vectors, 2), vectors[1], 5)
    assert [each.source for each in found.neighbors] == ["1", "0", "2"]
    np.testing.assert_allclose([each.score for each in found.neighbors], [1, 0.9486832980505138, -1], atol=1e-6)
    assert max(each.score for each in found.neighbors) <= 1


def test_vectors_without_a_direction_are_counted_and_left_out() -> None:
    vectors = np.array([[0, 0], [np.nan, 1], [np.inf, 1], [1, 0]], np.float32)
    found = search(in_chunks(vectors, 4), np.array([-1, 0], np.float32), 5)
    assert [(each.source, each.score) for each in found.neighbors] == [("3", -1)]
    assert (found.rows, found.skipped) == (4, 3)


@pytest.mark.parametrize("query", [[0, 0], [np.nan, 1], [np.inf, 0]])
def test_nor_can_the_query_be_one(query: list[float]) -> None:
    with pytest.raises(InvalidInput, match="no direction"):
        search([], np.array(query, np.float32), 5)


def test_of_no_vectors_none() -> None:
    assert search([], np.ones(2, np.float32), 5).neighbors == ()
