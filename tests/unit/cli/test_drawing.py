"""Drawings of detections and segments."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from PIL import Image

from graphkiln.cli.drawing import color_of, draw_detections, draw_segments
from graphkiln_backend.graph.preprocess import Preprocess
from graphkiln_backend.images.frame import frame_of
from graphkiln_client import Box, Detection, Mask, SegmentedImage


def detection(*box: float, **options: Any) -> Detection:
    return Detection(**{"box": Box(*box), "label": "cat", "index": 1, "score": 0.9, **options})


def drawn(size: tuple[int, int], *found: Detection) -> Any:
    return np.asarray(draw_detections(Image.new("RGB", size), found)).astype(int)


@pytest.mark.parametrize("width", [320, 1280])
def test_lines_and_labels_scale_with_the_image(width: int) -> None:
    unit = width // 320
    pixels = drawn((width, width), detection(40 * unit, 80 * unit, 200 * unit, 240 * unit))
    color = np.array(color_of(1))
    left = (pixels[160 * unit] == color).all(axis=-1)
    line = int(left[: 120 * unit].sum())
    assert line >= 2
    assert 0.9 * unit <= line <= 2.1 * unit
    plate = (pixels[:, 41 * unit] == color).all(axis=-1)[: 80 * unit].sum()
    assert 8 * unit <= plate <= 20 * unit


def test_edges_of_a_box() -> None:
    pixels = drawn((320, 320), detection(40, 80, 200, 240))
    rows, columns = np.nonzero(pixels[90:].any(axis=-1))
    assert (rows.max() + 91, columns.min(), columns.max() + 1) == (240, 40, 200)


@pytest.mark.parametrize(("size", "count"), [((1, 1), 1), ((1, 900), 1), ((900, 1), 1), ((64, 64), 0), ((64, 64), 300)])
def test_tiny_images_and_many_detections(size: tuple[int, int], count: int) -> None:
    pixels = drawn(size, *[detection(i % 60, i % 50, i % 60 + 4, i % 50 + 4, index=i) for i in range(count)])
    assert pixels.shape == (size[1], size[0], 3)
    assert pixels.any() == (count > 0)


def test_masks_and_keypoints() -> None:
    frame = frame_of(Preprocess(resize=(32, 32)), (320, 320))
    mask = Mask(probabilities=np.ones((28, 28), np.float32), frame=frame, box=(100, 100, 200, 200))
    pixels = drawn((320, 320), detection(100, 100, 200, 200, mask=mask, keypoints=np.array([[150.0, 120, 1]])))
    assert pixels[180, 150].any()
    assert (pixels[120, 150] == 255).all()


def test_missing_characters_are_replaced() -> None:
    one, other = (drawn((320, 320), detection(10, 50, 90, 90, label=label)) for label in ("größe", "gro?e"))
    np.testing.assert_array_equal(one, other)


def test_segments_with_legend() -> None:
    classes = np.zeros((320, 320), np.uint8)
    classes[160:] = 2
    image = SegmentedImage(classes=classes, labels=("__background__", "b", "c"), unseen=255)
    pixels = np.asarray(draw_segments(Image.new("RGB", (320, 320)), image))
    assert (pixels[300, 300] == pixels[200, 200]).all()
    assert pixels[300, 300].any()
    assert not pixels[100, 300].any()
    assert pixels[2, 2].any()  # the legend


@pytest.mark.parametrize(("labels", "tinted"), [((), False), (("Background",), False), (("road",), True)])
def test_background_class(labels: Any, tinted: bool) -> None:
    image = SegmentedImage(classes=np.zeros((320, 320), np.uint8), labels=labels, unseen=255)
    assert np.asarray(draw_segments(Image.new("RGB", (320, 320)), image)).any() == tinted


def in_16_bits() -> Image.Image:
    return Image.fromarray(np.full((40, 60), 128 * 257, np.uint16))


def with_a_transparent_palette() -> Image.Image:
    image = Image.new("RGB", (60, 40), (128, 128, 128)).convert("P", palette=Image.Palette.ADAPTIVE)
    image.info["transparency"] = bytes(range(256))
    return image


@pytest.mark.parametrize(
    "image",
    [
        in_16_bits(),
        with_a_transparent_palette(),
        Image.new("RGBA", (60, 40), (128, 128, 128, 0)),
        Image.new("CMYK", (60, 40), (127, 127, 127, 0)),
        Image.new("1", (60, 40), 1),
        Image.new("F", (60, 40), 128.0 * 257),
    ],
    ids=lambda image: image.mode,
)
def test_images_of_any_mode(image: Image.Image) -> None:
    pixels = np.asarray(draw_detections(image, []))
    gray = 255 if image.mode == "1" else 128
    assert pixels.shape == (40, 60, 3)
    assert np.abs(pixels.astype(int) - gray).max() <= 1
    classes = SegmentedImage(classes=np.zeros((40, 60), np.uint8), labels=(), unseen=255)
    np.testing.assert_array_equal(draw_segments(image, classes), pixels)


@pytest.mark.parametrize("place", [float("nan"), float("inf")])
def test_infinite_coordinates_are_not_drawn(place: float) -> None:
    assert not drawn((64, 64), detection(0, place, 8, 8)).any()
    pixels = drawn((64, 64), detection(30, 30, 40, 40, keypoints=np.array([[place, 5, 1], [5, 5, 1]])))
    assert (pixels[5, 5] == 255).all()


def test_undrawable_label_is_the_class_number() -> None:
    one, other = (drawn((320, 320), detection(10, 50, 90, 90, label=label)) for label in ("猫", ""))
    np.testing.assert_array_equal(one, other)
