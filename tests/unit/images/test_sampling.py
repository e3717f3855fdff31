"""Values between the cells of a grid, beside Pillow's own interpolation and by hand."""

from __future__ import annotations

import numpy as np
import pytest
from PIL import Image

from graphkiln_backend.images import sampling
from graphkiln_backend.images.sampling import best_class, sample_bilinear, sample_nearest


def centers(size: int, cells: int) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    return (np.arange(size) + 0.5) * (cells / size)


@pytest.mark.parametrize("size", [(7, 5), (8, 8), (31, 64), (5, 97)])
def test_is_pillows_enlargement(size: tuple[int, int]) -> None:
    """Pillow's bilinear filter is antialiased where it makes smaller, and the plain one where it makes larger."""
    grid = np.random.default_rng(1).standard_normal((5, 4)).astype(np.float32)
    expected = np.asarray(Image.fromarray(grid).resize(size[::-1], Image.Resampling.BILINEAR))
    found = sample_bilinear(grid[np.newaxis], centers(size[0], 5), centers(size[1], 4))[0]
    np.testing.assert_allclose(found, expected, atol=1e-5)


def test_the_cells_themselves() -> None:
    grid = np.arange(6, dtype=np.float32).reshape(1, 2, 3)
    np.testing.assert_array_equal(sample_bilinear(grid, centers(2, 2), centers(3, 3)), grid)


def test_beyond_the_edge_the_outermost_cells_go_on() -> None:
    grid = np.array([[[1, 3]]], np.float32)
    np.testing.assert_array_equal(
        sample_bilinear(grid, np.array([-9.0, 9.0]), np.array([-1.0, 1.0, 5.0]))[0, 1], [1, 2, 3]
    )


def test_one_cell() -> None:
    assert (sample_bilinear(np.full((1, 1, 1), 7, np.float32), centers(9, 1), centers(2, 1)) == 7).all()


def test_the_best_class_is_the_same_in_strips(monkeypatch: pytest.MonkeyPatch) -> None:
    scores = np.random.default_rng(2).standard_normal((4, 6, 5)).astype(np.float32)
    rows, columns = centers(37, 6), centers(23, 5)
    whole = best_class(scores, rows, columns)
    np.testing.assert_array_equal(whole, sample_bilinear(scores, rows, columns).argmax(axis=0))
    monkeypatch.setattr(sampling, "_MOST_VALUES", 4 * 23 * 3)
    np.testing.assert_array_equal(best_class(scores, rows, columns), whole)


@pytest.mark.parametrize(("classes", "kind"), [(256, np.uint8), (257, np.int32)])
def test_a_class_of_each_pixel_takes_a_byte_where_it_can(classes: int, kind: type[np.generic]) -> None:
    scores = np.zeros((classes, 1, 2), np.float32)
    scores[-1, 0, 1] = 1
    found = best_class(scores, centers(1, 1), centers(2, 2))
    assert found.dtype == kind
    np.testing.assert_array_equal(found, [[0, classes - 1]])


def test_the_nearest_cell() -> None:
    grid = np.array([[1, 2], [3, 4]])
    np.testing.assert_array_equal(
        sample_nearest(grid, np.array([0.5, 1.99, 7]), np.array([-3, 0.99, 1.0])),
        [
            [1, 1, 2],
            [3, 3, 4],
            [3, 3, 4],
        ],
    )
