"""Masks at the size of the image, and their run lengths."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from PIL import Image
from pycocotools import mask as coco

from graphkiln_backend.graph.preprocess import Letterbox, Preprocess
from graphkiln_backend.images import masks as sampling
from graphkiln_backend.images.frame import frame_of
from graphkiln_backend.images.masks import Mask, best_class, encode_rle, sample_bilinear, sample_nearest

FRAME = frame_of(Preprocess(resize=(32, 32)), (60, 80))


def test_mask_fills_its_box() -> None:
    mask = Mask(probabilities=np.ones((28, 28), np.float32), frame=FRAME, box=(10, 20, 30, 50))
    pixels = mask.pixels()
    assert pixels.shape == (60, 80)
    rows, columns = np.nonzero(pixels)
    np.testing.assert_allclose((rows.min(), rows.max(), columns.min(), columns.max()), (20, 50, 10, 30), atol=1)


@pytest.mark.parametrize("box", [(-20, -20, -5, -5), (200, 200, 300, 300), (-10, -10, 500, 500), (5, 5, 5, 5)])
def test_boxes_at_the_edge(box: Any) -> None:
    pixels = Mask(probabilities=np.ones((4, 4), np.float32), frame=FRAME, box=box).pixels()
    assert pixels.shape == (60, 80)
    assert pixels.any() == (box[0] < 80 and box[2] > 0)


@pytest.mark.parametrize("corner", [float("nan"), float("inf"), float("-inf"), 1e30, -1e30])
def test_invalid_boxes(corner: float) -> None:
    """In fp16 numbers overflow; the whole answer was an error of Python."""
    for box in ((corner, 0, 10, 10), (0, 0, 10, corner)):
        mask = Mask(probabilities=np.ones((4, 4), np.float32), frame=FRAME, box=box)
        assert mask.rle() == {"size": [60, 80], "counts": [4800]}


def test_half_of_a_box() -> None:
    left = np.zeros((28, 28), np.float32)
    left[:, :14] = 1
    pixels = Mask(probabilities=left, frame=FRAME, box=(10, 20, 50, 40)).pixels()
    assert pixels[30, 11:29].all()
    assert not pixels[30, 32:].any()


def test_mask_of_a_letterbox() -> None:
    frame = frame_of(Preprocess(letterbox=Letterbox(size=(64, 64))), (20, 40))  # rows 16 to 48 hold the image
    probabilities = np.zeros((16, 16), np.float32)
    probabilities[4:8] = 1  # rows 16 to 32: the upper half of the image
    pixels = Mask(probabilities=probabilities, frame=frame).pixels()
    assert pixels[:9].all()
    assert not pixels[11:].any()


def test_order_of_run_lengths() -> None:
    assert encode_rle(np.array([[0, 1], [1, 1]], bool)) == {"size": [2, 2], "counts": [1, 3]}
    assert encode_rle(np.array([[1, 0], [1, 0]], bool)) == {"size": [2, 2], "counts": [0, 2, 2]}
    assert encode_rle(np.zeros((2, 3), bool)) == {"size": [2, 3], "counts": [6]}


@pytest.mark.slow
def test_masks_equal_torchvision() -> None:
    """Torchvision's own function on the same probabilities and boxes."""
    import torch

    from graphkiln_converters.torch_libraries import import_torchvision

    import_torchvision()
    from torchvision.models.detection.roi_heads import paste_masks_in_image

    rng = np.random.default_rng(3)
    starts = rng.uniform(-5, 50, (40, 2))
    boxes = np.concatenate([starts, starts + rng.uniform(0.5, 60, (40, 2))], axis=1).astype(np.float32)
    masks = rng.uniform(0, 1, (40, 1, 28, 28)).astype(np.float32)
    pasted = paste_masks_in_image(torch.from_numpy(masks), torch.from_numpy(boxes), (60, 80)).numpy()[:, 0]
    for mask, box, expected in zip(masks, boxes, pasted, strict=True):
        found = Mask(probabilities=mask[0], frame=FRAME, box=tuple(map(float, box))).pixels()
        clear = abs(expected - 0.5) > 1e-5  # the others are ties
        np.testing.assert_array_equal(found[clear], (expected > 0.5)[clear])


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # pycocotools 2.0.11 with numpy 2
@given(pixels=arrays.arrays(bool, st.tuples(st.integers(1, 9), st.integers(1, 9))))
def test_run_lengths_equal_pycocotools(pixels: Any) -> None:
    height, width = pixels.shape
    packed = coco.frPyObjects(encode_rle(pixels), height, width)
    assert packed == coco.encode(np.asfortranarray(pixels.astype(np.uint8)))
    np.testing.assert_array_equal(coco.decode(packed), pixels)


# Values between the cells of a grid, beside Pillow's own interpolation and by hand.


def centers(size: int, cells: int) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    return (np.arange(size) + 0.5) * (cells / size)


@pytest.mark.parametrize("size", [(7, 5), (8, 8), (31, 64), (5, 97)])
def test_bilinear_equals_pillow(size: tuple[int, int]) -> None:
    """Pillow's bilinear filter is antialiased where it makes smaller, and the plain one where it makes larger."""
    grid = np.random.default_rng(1).standard_normal((5, 4)).astype(np.float32)
    expected = np.asarray(Image.fromarray(grid).resize(size[::-1], Image.Resampling.BILINEAR))
    found = sample_bilinear(grid[np.newaxis], centers(size[0], 5), centers(size[1], 4))[0]
    np.testing.assert_allclose(found, expected, atol=1e-5)


def test_bilinear_at_cell_centers() -> None:
    grid = np.arange(6, dtype=np.float32).reshape(1, 2, 3)
    np.testing.assert_array_equal(sample_bilinear(grid, centers(2, 2), centers(3, 3)), grid)


def test_bilinear_beyond_the_edge() -> None:
    grid = np.array([[[1, 3]]], np.float32)
    np.testing.assert_array_equal(
        sample_bilinear(grid, np.array([-9.0, 9.0]), np.array([-1.0, 1.0, 5.0]))[0, 1], [1, 2, 3]
    )


def test_best_class_in_strips(monkeypatch: pytest.MonkeyPatch) -> None:
    scores = np.random.default_rng(2).standard_normal((4, 6, 5)).astype(np.float32)
    rows, columns = centers(37, 6), centers(23, 5)
    whole = best_class(scores, rows, columns)
    np.testing.assert_array_equal(whole, sample_bilinear(scores, rows, columns).argmax(axis=0))
    monkeypatch.setattr(sampling, "_MOST_VALUES", 4 * 23 * 3)
    np.testing.assert_array_equal(best_class(scores, rows, columns), whole)


@pytest.mark.parametrize(("classes", "kind"), [(256, np.uint8), (257, np.int32)])
def test_dtype_of_class_maps(classes: int, kind: type[np.generic]) -> None:
    scores = np.zeros((classes, 1, 2), np.float32)
    scores[-1, 0, 1] = 1
    found = best_class(scores, centers(1, 1), centers(2, 2))
    assert found.dtype == kind
    np.testing.assert_array_equal(found, [[0, classes - 1]])


def test_nearest() -> None:
    grid = np.array([[1, 2], [3, 4]])
    np.testing.assert_array_equal(
        sample_nearest(grid, np.array([0.5, 1.99, 7]), np.array([-3, 0.99, 1.0])),
        [
            [1, 1, 2],
            [3, 3, 4],
            [3, 3, 4],
        ],
    )
