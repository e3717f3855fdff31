"""Masks at the size of the image, and their run lengths."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from pycocotools import mask as coco

from graphkiln_backend.graph.preprocess import Letterbox, Preprocess
from graphkiln_backend.images.frame import frame_of
from graphkiln_backend.images.masks import Mask, decode_rle, encode_rle

FRAME = frame_of(Preprocess(resize=(32, 32)), (60, 80))


def test_a_mask_fills_its_box() -> None:
    mask = Mask(probabilities=np.ones((28, 28), np.float32), frame=FRAME, box=(10, 20, 30, 50))
    pixels = mask.pixels()
    assert pixels.shape == (60, 80)
    rows, columns = np.nonzero(pixels)
    np.testing.assert_allclose((rows.min(), rows.max(), columns.min(), columns.max()), (20, 50, 10, 30), atol=1)


@pytest.mark.parametrize("box", [(-20, -20, -5, -5), (200, 200, 300, 300), (-10, -10, 500, 500), (5, 5, 5, 5)])
def test_a_box_at_the_edge_or_of_no_size(box: Any) -> None:
    pixels = Mask(probabilities=np.ones((4, 4), np.float32), frame=FRAME, box=box).pixels()
    assert pixels.shape == (60, 80)
    assert pixels.any() == (box[0] < 80 and box[2] > 0)


@pytest.mark.parametrize("corner", [float("nan"), float("inf"), float("-inf"), 1e30, -1e30])
def test_a_box_that_is_nowhere_has_no_pixels(corner: float) -> None:
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


def test_a_mask_of_the_whole_input_is_freed_of_its_letterbox() -> None:
    frame = frame_of(Preprocess(letterbox=Letterbox(size=(64, 64))), (20, 40))  # rows 16 to 48 hold the image
    probabilities = np.zeros((16, 16), np.float32)
    probabilities[4:8] = 1  # rows 16 to 32: the upper half of the image
    pixels = Mask(probabilities=probabilities, frame=frame).pixels()
    assert pixels[:9].all()
    assert not pixels[11:].any()


@given(pixels=arrays.arrays(bool, st.tuples(st.integers(1, 9), st.integers(1, 9))))
def test_run_lengths_hold_the_mask(pixels: Any) -> None:
    rle = encode_rle(pixels)
    assert sum(rle["counts"]) == pixels.size
    np.testing.assert_array_equal(decode_rle(rle), pixels)


def test_runs_go_down_the_columns_and_begin_with_zeros() -> None:
    assert encode_rle(np.array([[0, 1], [1, 1]], bool)) == {"size": [2, 2], "counts": [1, 3]}
    assert encode_rle(np.array([[1, 0], [1, 0]], bool)) == {"size": [2, 2], "counts": [0, 2, 2]}
    assert encode_rle(np.zeros((2, 3), bool)) == {"size": [2, 3], "counts": [6]}


@pytest.mark.slow
def test_is_what_torchvision_pastes() -> None:
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


@given(pixels=arrays.arrays(bool, st.tuples(st.integers(1, 9), st.integers(1, 9))))
def test_run_lengths_are_those_of_pycocotools(pixels: Any) -> None:
    height, width = pixels.shape
    packed = coco.frPyObjects(encode_rle(pixels), height, width)
    assert packed == coco.encode(np.asfortranarray(pixels.astype(np.uint8)))
    np.testing.assert_array_equal(coco.decode(packed), pixels)
