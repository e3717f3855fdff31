"""Maps from a sample back to its image, checked with marked pixels."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from graphkiln_backend.graph.dtypes import DType
from graphkiln_backend.graph.preprocess import Letterbox, Preprocess
from graphkiln_backend.images.decoding import prepare
from graphkiln_backend.images.frame import Frame, frame_of

RAW: dict[str, Any] = {"layout": "HWC", "dtype": DType.UINT8, "color": "L", "interpolation": "bilinear"}
SPECS = [
    Preprocess(**RAW),
    Preprocess(**RAW, resize=(64, 96)),
    Preprocess(**RAW, resize=64),
    Preprocess(**RAW, resize=64, crop=(48, 56)),
    Preprocess(**RAW, crop=(200, 40)),
    Preprocess(**RAW, letterbox=Letterbox(size=(64, 96), padding=0)),
    Preprocess(**RAW, letterbox=Letterbox(size=(96, 64), padding=0, position="top-left", rounding="down")),
    Preprocess(**RAW, letterbox=Letterbox(size=(200, 200), padding=0, enlarge=False)),
]


def center_of(pixels: np.ndarray[Any, Any]) -> tuple[float, float]:
    """The center of mass x, y of a light spot on black, in coordinates of edges."""
    weights = pixels[..., 0].astype(np.float64)
    rows, columns = np.indices(weights.shape)
    return float((weights * (columns + 0.5)).sum() / weights.sum()), float(
        (weights * (rows + 0.5)).sum() / weights.sum()
    )


@settings(max_examples=60, deadline=None)
@given(
    spec=st.sampled_from(SPECS),
    size=st.tuples(st.integers(30, 150), st.integers(30, 150)),
    place=st.tuples(st.floats(0.35, 0.6), st.floats(0.35, 0.6)),
)
def test_marked_block(spec: Preprocess, size: Any, place: Any) -> None:
    """Odd, even, portrait: the block's center of mass in the sample, mapped back, is its center in the image."""
    height, width = size
    top, left = int(place[0] * height), int(place[1] * width)
    image = np.zeros((height, width), np.uint8)
    image[top : top + 6, left : left + 6] = 255
    prepared = prepare(image, spec)
    frame = frame_of(spec, (height, width))
    assert prepared.sample.shape[:2] == (frame.input_height, frame.input_width)
    x1, y1, x2, y2 = frame.to_input(np.array([left, top, left + 6, top + 6]))
    assume(x1 >= 1 and y1 >= 1 and x2 <= frame.input_width - 1 and y2 <= frame.input_height - 1)  # none of it cropped
    found = frame.to_image(np.array(center_of(prepared.sample)))
    np.testing.assert_allclose(found, (left + 3, top + 3), atol=0.12 * max(frame.scale_x, frame.scale_y, 1))


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("size", [(1, 1), (1, 8000), (8000, 1), (8000, 8000), (33, 77), (77, 33)])
def test_inverse(spec: Preprocess, size: Any) -> None:
    frame = frame_of(spec, size)
    points = np.array([[0, 0, size[1], size[0]], [0.25, 0.5, 0.75, 1]])
    np.testing.assert_allclose(frame.to_image(frame.to_input(points)), points, rtol=1e-12, atol=1e-9)


@pytest.mark.parametrize("size", [(1, 1), (1, 8000), (8000, 1), (8000, 6001)])
def test_letterbox_covers_the_image(size: Any) -> None:
    spec = SPECS[5]
    frame = frame_of(spec, size)
    height, width = spec.resized(*size)
    content = np.array([[frame.left, frame.top, frame.left + width, frame.top + height]], np.float32)
    np.testing.assert_allclose(frame.to_image(content), [[0, 0, size[1], size[0]]], atol=1e-9)


def test_boxes_are_clipped() -> None:
    frame = Frame(width=100, height=50, input_width=64, input_height=64, scale_x=2, scale_y=2, left=7, top=20)
    boxes = frame.boxes_to_image(np.array([[0, 0, 64, 64], [17, 25, 27, 35]], np.float32))
    np.testing.assert_array_equal(boxes, [[0, 0, 100, 50], [20, 10, 40, 30]])


def test_centers_of_rows_and_columns() -> None:
    frame = Frame(width=4, height=2, input_width=4, input_height=4, scale_x=1, scale_y=0.5, left=1, top=-1)
    np.testing.assert_array_equal(frame.columns(), [1.5, 2.5, 3.5, 4.5])
    np.testing.assert_array_equal(frame.rows(), [0, 2])
