"""The models of the library: all are there, and MoCo v3's positions are those of its paper."""

from __future__ import annotations

import math

import library_models
import library_split
import pytest


def test_the_benchmark_has_every_model() -> None:
    assert tuple(library_models.MODELS) == library_split.NAMES


def test_positions_are_sines_and_cosines_of_column_and_row() -> None:
    (table,) = library_models.sine_positions(3, 8)
    assert table.shape == (10, 8)
    assert not table[0].any()
    row, column = 2, 1
    angles = [column, column / 100, row, row / 100]
    expected = [
        *map(math.sin, angles[:2]), *map(math.cos, angles[:2]), *map(math.sin, angles[2:]), *map(math.cos, angles[2:])
    ]  # fmt: skip
    assert table[1 + row * 3 + column].tolist() == pytest.approx(expected, abs=1e-6)
