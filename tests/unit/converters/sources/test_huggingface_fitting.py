"""How images get into detectors, segmenters and depth estimators of transformers: beside their own image processors."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from PIL import Image

from graphkiln_backend.graph.preprocess import Letterbox
from graphkiln_backend.images.decoding import load_sample
from graphkiln_converters.sources.huggingface import fitted_preprocess, fitted_size
from graphkiln_converters.torch_libraries import import_torchvision

import_torchvision()
import transformers as hf  # noqa: E402 - transformers imports torchvision


def processor(**changes: Any) -> Any:
    size = SimpleNamespace(height=None, width=None, shortest_edge=None, longest_edge=None)
    told: dict[str, Any] = {
        "size": size, "do_rescale": True, "do_normalize": True, "image_mean": [0.5] * 3, "image_std": [0.25] * 3,
        "resample": 2,
    }  # fmt: skip
    return SimpleNamespace(**{**told, **changes})


def sized(**sizes: int) -> Any:
    return SimpleNamespace(**{"height": None, "width": None, "shortest_edge": None, "longest_edge": None, **sizes})


@pytest.mark.parametrize(
    ("config", "told", "expected"),
    [
        ({"image_size": [64, 96]}, {}, (64, 96)),
        ({"image_size": None}, {"size": sized(height=640, width=600)}, (640, 600)),
        ({"image_size": 224}, {"do_center_crop": True, "crop_size": sized(height=513, width=510)}, (513, 510)),
        ({}, {"size": sized(shortest_edge=790)}, (800, 800)),
        ({"image_size": 224}, {}, (224, 224)),
        ({}, {}, (800, 800)),
    ],
)
def test_the_usual_size(config: dict[str, Any], told: dict[str, Any], expected: tuple[int, int]) -> None:
    assert fitted_size(SimpleNamespace(**config), processor(**told)) == expected


def test_images_are_fitted_as_the_processor_does() -> None:
    exact = fitted_preprocess(processor(size=sized(height=64, width=96)), (64, 96))
    assert exact is not None
    assert (exact.resize, exact.letterbox, exact.mean) == ((64, 96), None, (0.5,) * 3)
    for told in ({"size": sized(shortest_edge=64)}, {"size": sized(height=64, width=64), "keep_aspect_ratio": True}):
        padded = fitted_preprocess(processor(do_normalize=False, **told), (64, 64))
        assert padded is not None
        assert padded.letterbox == Letterbox(size=(64, 64), padding=None, position="top-left", rounding="down")
        assert padded.mean == ()


@pytest.mark.parametrize("told", [{"do_rescale": False}, {"rescale_factor": 1 / 127.5}, {"resample": 9}])
def test_what_no_spec_can_express(told: dict[str, Any]) -> None:
    assert fitted_preprocess(processor(**told), (64, 64)) is None


def test_a_model_without_a_processor() -> None:
    assert fitted_preprocess(None, (64, 64)) is None


@pytest.mark.parametrize(
    ("name", "options", "size"),
    [
        ("Segformer", {"size": {"height": 48, "width": 64}}, (48, 64)),
        ("Beit", {"size": {"height": 48, "width": 48}}, (48, 48)),  # bicubic
        ("Beit", {"size": {"height": 60, "width": 60}, "do_center_crop": True}, (224, 224)),
        ("DPT", {"size": {"height": 48, "width": 64}}, (48, 64)),
        ("MobileViT", {"size": {"shortest_edge": 60}, "crop_size": {"height": 48, "width": 48}}, (48, 48)),  # BGR
        ("MobileNetV2", {"size": {"shortest_edge": 60}, "crop_size": {"height": 48, "width": 48}}, (48, 48)),
        ("RTDetr", {"size": {"height": 64, "width": 64}}, (64, 64)),
    ],
)
def test_the_samples_are_those_of_the_library(name: str, options: dict[str, Any], size: tuple[int, int]) -> None:
    made = getattr(hf, f"{name}ImageProcessorPil")(**options)
    pixels = np.random.default_rng(3).integers(0, 256, (70, 90, 3), np.uint8)
    image = Image.fromarray(pixels)
    spec = fitted_preprocess(made, size)
    assert spec is not None
    (expected,) = made(image, return_tensors="np")["pixel_values"]
    np.testing.assert_allclose(load_sample(image, spec), expected, rtol=0, atol=1e-5)


def test_what_pads_on_all_sides_has_no_spec() -> None:
    sizes = {"size": sized(height=64, width=64)}
    kind = type("Sapiens2ImageProcessor", (SimpleNamespace,), {})
    padding, stretching = (kind(**vars(processor(do_pad=pads, **sizes))) for pads in (True, False))
    assert fitted_preprocess(padding, (64, 64)) is None
    assert fitted_preprocess(stretching, (64, 64)) is not None
