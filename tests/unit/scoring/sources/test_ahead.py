"""Answers come in the order of their questions, and not all are asked at once."""

from __future__ import annotations

import pytest

from graphkiln_backend.scoring.sources.base import map_ahead


def test_results_stand_in_order() -> None:
    assert list(map_ahead(lambda number: number * 2, range(100), threads=3)) == list(range(0, 200, 2))


def test_few_are_asked_ahead() -> None:
    asked = []
    results = map_ahead(lambda number: number, (asked.append(one) or one for one in range(1000)), threads=2)
    assert next(results) == 0
    assert len(asked) <= 4
    results.close()  # type: ignore[attr-defined]


def test_an_error_comes_to_whoever_asked() -> None:
    with pytest.raises(ZeroDivisionError):
        list(map_ahead(lambda number: 1 // number, [1, 0]))
