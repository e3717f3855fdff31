"""What of torchvision's detectors is known without running them."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from tiny_detectors import tiny_detector

from graphkiln_backend.graph.errors import ConversionError
from graphkiln_backend.graph.preprocess import Letterbox
from graphkiln_converters.sources import torchvision as torchvision_detection
from graphkiln_converters.sources.base import SourceOptions
from graphkiln_converters.sources.torchvision import detector_module, list_detectors

FIXED = SimpleNamespace(fixed_size=(320, 300), min_size=(1,), image_mean=[0.5] * 3, image_std=[0.5] * 3)
FREE = SimpleNamespace(fixed_size=None, min_size=(790,), image_mean=[0.5] * 3, image_std=[0.5] * 3)


def test_detectors_are_listed() -> None:
    assert {"ssdlite320_mobilenet_v3_large", "retinanet_resnet50_fpn"} <= set(list_detectors())


def test_the_usual_size_is_the_models_own() -> None:
    assert torchvision_detection._size(FIXED, SourceOptions()) == (300, 320)
    assert torchvision_detection._size(FREE, SourceOptions()) == (800, 800)


@pytest.mark.parametrize("shape", [(3, 100, 320), (1, 320, 320), (320, 320)])
def test_other_sizes_than_torchvision_makes_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ConversionError) as caught:
        torchvision_detection._size(FREE, SourceOptions(shapes={"": shape}))
    assert "--shape 3x" in caught.value.hint


def test_images_are_fitted_as_torchvision_does() -> None:
    assert torchvision_detection._preprocess(FIXED, (300, 320)).resize == (300, 320)
    fitted = torchvision_detection._preprocess(FREE, (800, 640)).letterbox
    assert fitted == Letterbox(size=(800, 640), padding=None, position="top-left", rounding="down")


def test_a_detector_of_another_kind_is_refused() -> None:
    with pytest.raises(ConversionError, match="how torchvision's object detects is not known"):
        detector_module(object(), (64, 64))


@pytest.mark.parametrize(
    ("kind", "masks", "keypoints"),
    [("ssd", None, None), ("masked", "masks", None), ("keypoints", None, "keypoints")],
)
def test_the_task_names_what_the_model_has(kind: str, masks: str | None, keypoints: str | None) -> None:
    model = tiny_detector(kind)
    task = torchvision_detection._task(model)
    assert (task.masks, task.keypoints, task.mask_frame) == (masks, keypoints, "box")
    assert torchvision_detection._most(model) == (30 if kind == "ssd" else 15)
