"""Preprocess specs: validation, geometry and normalization."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphkiln_backend.graph.dtypes import DType
from graphkiln_backend.graph.errors import ManifestError
from graphkiln_backend.graph.preprocess import Letterbox, Preprocess


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"mean": (0.5,)}, "preprocess.mean must have 3 values"),
        ({"std": (1.0, 0.0, 1.0)}, "must not hold a zero"),
        ({"dtype": DType.INT64}, "must be UINT8, FP16 or FP32"),
        ({"dtype": DType.UINT8, "mean": (0.5, 0.5, 0.5)}, "must be empty for dtype UINT8"),
        ({"resize": 0}, "at least 1 pixel"),
        ({"crop": (8, -1)}, "at least 1 pixel"),
    ],
)
def test_invalid_fields(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ManifestError, match=message):
        Preprocess(**fields)


def test_json_round_trip() -> None:
    spec = Preprocess(resize=(7, 9), crop=(5, 5), mean=(0.1, 0.2, 0.3), std=(1.0, 2.0, 3.0), layout="HWC")
    assert Preprocess.from_json(spec.to_json()) == spec


@pytest.mark.parametrize(
    ("fields", "shape", "sample"),
    [
        ({}, ("batch", 3, 48, 48), ""),
        ({}, ("batch", 48, 48, 3), "CHW [3, any, any]"),
        ({"layout": "HWC"}, ("batch", 48, 48, 3), ""),
        ({"color": "L"}, (3, 48, 48), "CHW [1, any, any]"),
        ({"crop": (48, 48)}, ("batch", 3, "height", "width"), ""),
        ({"crop": (48, 48)}, (3, 48, 64), "CHW [3, 48, 48]"),
        ({"crop": (48, 48), "resize": 64}, (3, 48, 48), ""),
        ({"resize": 64}, (3, 48, 48), "CHW [3, any, any] with a shorter side of 64"),
        ({"resize": 48}, (3, 64, 48), ""),
        ({"resize": 64}, (3, 48, "width"), ""),
        ({"resize": (64, 48)}, (3, 64, 64), "CHW [3, 64, 48]"),
        ({"letterbox": Letterbox(size=(64, 48))}, (3, 64, 64), "CHW [3, 64, 48]"),
        ({}, ("batch", 784), "CHW [3, any, any]"),
    ],
)
def test_samples_that_do_not_fit_an_input(fields: dict[str, Any], shape: tuple[int | str, ...], sample: str) -> None:
    assert Preprocess(**fields).misfit(shape) == sample


@given(height=st.integers(1, 400), width=st.integers(1, 400), side=st.integers(1, 300))
def test_resize_to_the_shorter_side(height: int, width: int, side: int) -> None:
    resized = Preprocess(resize=side).resized(height, width)
    assert min(resized) == side
    assert max(resized) == int(side * max(height, width) / min(height, width))


@given(height=st.integers(1, 60), width=st.integers(1, 60), crop=st.tuples(st.integers(1, 60), st.integers(1, 60)))
def test_crop_is_centered(height: int, width: int, crop: tuple[int, int]) -> None:
    left, top, right, bottom = Preprocess(crop=crop).cropped(height, width)
    assert (bottom - top, right - left) == crop
    assert abs((left + right) - width) <= 1
    assert abs((top + bottom) - height) <= 1


@pytest.mark.parametrize("layout", ["CHW", "HWC"])
@pytest.mark.parametrize("dtype", [DType.FP32, DType.FP16, DType.UINT8])
def test_normalize(layout: Any, dtype: DType) -> None:
    pixels = np.random.default_rng(7).integers(0, 256, (5, 6, 3), np.uint8)
    scaled = dtype is not DType.UINT8
    mean, std = ((0.4, 0.5, 0.6), (0.2, 0.3, 0.4)) if scaled else ((), ())
    sample = Preprocess(layout=layout, dtype=dtype, mean=mean, std=std).normalize(pixels)
    expected = pixels.astype(np.float64)
    if scaled:
        expected = (expected / 255 - np.array(mean)) / np.array(std)
    if layout == "CHW":
        expected = np.moveaxis(expected, 2, 0)
    assert sample.dtype == dtype.numpy
    assert sample.flags.c_contiguous
    np.testing.assert_allclose(sample, expected, atol=2e-3 if dtype is DType.FP16 else 1e-6)


# Even and odd differences of sizes, both ways. torchvision: `int(round((size - crop) / 2.0))` of what is left after it
# padded with `(crop - size) // 2`; transformers: `(size - crop) // 2` throughout.
@pytest.mark.parametrize(
    ("rounding", "size", "crop", "start"),
    [
        ("half-even", 10, 4, 3),
        ("half-even", 11, 4, 4),
        ("half-even", 9, 4, 2),
        ("half-even", 13, 4, 4),
        ("half-even", 4, 7, -1),
        ("half-even", 4, 10, -3),
        ("down", 10, 4, 3),
        ("down", 11, 4, 3),
        ("down", 9, 4, 2),
        ("down", 13, 4, 4),
        ("down", 4, 7, -2),
        ("down", 4, 10, -3),
    ],
)
def test_rounding_of_crops(rounding: Any, size: int, crop: int, start: int) -> None:
    spec = Preprocess(crop=(crop, crop), crop_rounding=rounding)
    assert spec.cropped(size, size) == (start, start, start + crop, start + crop)


def test_crop_of_one_axis() -> None:
    assert Preprocess(crop=(4, 7)).cropped(5, 7) == (0, 0, 7, 4)  # (5 - 4) / 2 rounds to even


@pytest.mark.parametrize(
    ("resize", "size", "expected"),
    [
        (None, (5, 7), (5, 7)),
        ((3, 9), (5, 7), (3, 9)),
        (10, (20, 33), (10, 16)),  # 16.5: torchvision truncates
        (1, (1000, 1), (1000, 1)),
    ],
)
def test_resized(resize: Any, size: tuple[int, int], expected: tuple[int, int]) -> None:
    assert Preprocess(resize=resize).resized(*size) == expected


@pytest.mark.parametrize(("color", "channels"), [("RGB", 3), ("BGR", 3), ("L", 1)])
def test_number_of_channels(color: Any, channels: int) -> None:
    assert Preprocess(color=color, mean=(0.5,) * channels).channels == channels
    with pytest.raises(ManifestError, match=f"must have {channels} values, got 2"):
        Preprocess(color=color, std=(0.5, 0.5))


def test_strided_pixels() -> None:
    pixels = np.arange(2 * 4 * 3, dtype=np.uint8).reshape(2, 4, 3)
    mirrored = pixels[:, ::-1]
    spec = Preprocess()
    np.testing.assert_array_equal(spec.normalize(mirrored), spec.normalize(mirrored.copy()))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"resize": [1]}', "'preprocess.resize' must be a list of 2"),
        ('{"dtype": "INT8"}', "preprocess.dtype must be UINT8, FP16 or FP32, got INT8"),
        ('{"interpolation": "cubic"}', "'preprocess.interpolation' must be one of 'nearest'"),
        ('{"letterbox": {}}', "missing key 'preprocess.letterbox.size'"),
        ('{"letterbox": {"size": [0, 4]}}', "preprocess.letterbox.size must be at least 1 pixel"),
        ('{"letterbox": {"size": [4, 4], "padding": 256}}', "preprocess.letterbox.padding must be from 0 to 255"),
        ('{"letterbox": {"size": [4, 4]}, "resize": 4}', "leave out resize and crop"),
        ('{"letterbox": {"size": [4, 4], "position": "left"}}', "'preprocess.letterbox.position' must be one of"),
    ],
)
def test_errors_name_the_key(text: str, message: str) -> None:
    with pytest.raises(ManifestError) as caught:
        Preprocess.from_json(text)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("letterbox", "image", "resized", "box"),
    [
        (Letterbox(size=(640, 640)), (480, 640), (480, 640), (0, -80, 640, 560)),
        (Letterbox(size=(640, 640)), (1281, 8000), (102, 640), (0, -269, 640, 371)),  # 102.48 rounds down
        (Letterbox(size=(640, 640), rounding="down"), (1290, 8000), (103, 640), (0, -268, 640, 372)),
        (Letterbox(size=(640, 640)), (1295, 8000), (104, 640), (0, -268, 640, 372)),
        (Letterbox(size=(64, 32), position="top-left"), (10, 10), (32, 32), (0, 0, 32, 64)),
        (Letterbox(size=(64, 32), enlarge=False), (10, 11), (10, 11), (-10, -27, 22, 37)),
        (Letterbox(size=(64, 64)), (1, 8000), (1, 64), (0, -31, 64, 33)),
        (Letterbox(size=(64, 64), rounding="down"), (8000, 1), (64, 1), (-31, 0, 33, 64)),
        (Letterbox(size=(64, 64)), (1, 1), (64, 64), (0, 0, 64, 64)),
    ],
)
def test_letterbox_examples(letterbox: Letterbox, image: Any, resized: Any, box: Any) -> None:
    spec = Preprocess(letterbox=letterbox)
    assert spec.resized(*image) == resized
    assert spec.cropped(*resized) == box


@given(
    size=st.tuples(st.integers(1, 700), st.integers(1, 700)),
    image=st.tuples(st.integers(1, 9000), st.integers(1, 9000)),
    rounding=st.sampled_from(["nearest", "down"]),
    position=st.sampled_from(["center", "top-left"]),
)
def test_letterbox_has_its_size(size: Any, image: Any, rounding: Any, position: Any) -> None:
    letterbox = Letterbox(size=size, rounding=rounding, position=position)
    resized = letterbox.resized(*image)
    left, top, right, bottom = letterbox.box(*resized)
    assert (bottom - top, right - left) == size
    assert left <= 0 <= resized[1] <= right
    assert top <= 0 <= resized[0] <= bottom
    assert resized[0] == size[0] or resized[1] == size[1]


def test_spec_without_letterbox_is_written_as_before() -> None:
    assert "letterbox" not in Preprocess().to_json()
    spec = Preprocess(letterbox=Letterbox(size=(4, 5), padding=None))
    assert Preprocess.from_json(spec.to_json()) == spec


@pytest.mark.parametrize("layout", ["CHW", "HWC"])
@pytest.mark.parametrize("channels", [1, 3])
def test_normalize_is_bit_exact(layout: Any, channels: int) -> None:
    """To the last bit, in whatever strides they are computed."""
    pixels = np.random.default_rng(3).integers(0, 256, (7, 5, channels), np.uint8)
    mean, std = (0.485, 0.456, 0.406)[:channels], (0.229, 0.224, 0.225)[:channels]
    color: Any = "RGB" if channels == 3 else "L"
    sample = Preprocess(layout=layout, color=color, mean=mean, std=std).normalize(pixels)
    alone = (pixels.astype(np.float32) / np.float32(255) - np.asarray(mean, np.float32)) / np.asarray(std, np.float32)
    np.testing.assert_array_equal(sample, alone if layout == "HWC" else alone.transpose(2, 0, 1))


@pytest.mark.parametrize("layout", ["CHW", "HWC"])
@pytest.mark.parametrize("color", ["RGB", "BGR", "L"])
@pytest.mark.parametrize("dtype", [DType.UINT8, DType.FP32])
def test_picture_of_a_sample(layout: Any, color: Any, dtype: DType) -> None:
    channels = 1 if color == "L" else 3
    image = np.random.default_rng(0).integers(0, 256, (5, 7, channels), np.uint8)
    scaled = {} if dtype is DType.UINT8 else {"mean": (0.4,) * channels, "std": (0.2,) * channels}
    spec = Preprocess(layout=layout, color=color, dtype=dtype, **scaled)
    expected = {"RGB": image, "BGR": image[..., ::-1], "L": image[..., 0]}[color]
    np.testing.assert_array_equal(spec.picture(spec.normalize(image)), expected)


def test_picture_of_something_else() -> None:
    spec = Preprocess()
    for shape in ((3,), (1, 5, 5), (5, 5, 3), (2, 3, 5, 5)):
        with pytest.raises(ManifestError, match="is no RGB image in CHW"):
            spec.picture(np.zeros(shape, np.float32))
    assert spec.picture(np.full((3, 1, 1), np.nan, np.float32)).tolist() == [[[0, 0, 0]]]
