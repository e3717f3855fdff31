"""Architectures of torchvision: preprocessing, detectors, segmenters, weights for other classes."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from recipes import recipe
from tiny_detectors import tiny_detector

from graphkiln_backend.graph.errors import ConversionError
from graphkiln_backend.graph.task import Segmentation
from graphkiln_converters.sources import torchvision as torchvision_detection
from graphkiln_converters.sources.torchvision import (
    build_model,
    detector_module,
    open_segmenter,
    open_source,
    preprocess_from_transforms,
    trained_heads,
)
from graphkiln_converters.torch_libraries import import_torchvision


def transforms(**changes: Any) -> SimpleNamespace:
    published = {
        "crop_size": [224],
        "resize_size": [256],
        "mean": [0.485, 0.456, 0.406],
        "std": [0.229, 0.224, 0.225],
        "interpolation": SimpleNamespace(value="bilinear"),
    }
    return SimpleNamespace(**{**published, **changes})


class TestSpec:
    @pytest.mark.parametrize(
        ("shape", "resize"),
        [((3, 112, 112), 128), ((3, 448, 448), 512), ((3, 64, 96), 73), ((3, 96, 64), 73), ((3, 1, 1), 1)],
    )
    def test_the_resize_keeps_the_published_ratio_to_the_crop(self, shape: tuple[int, int, int], resize: int) -> None:
        spec = preprocess_from_transforms(transforms(), shape)
        assert (spec.resize, spec.crop) == (resize, shape[1:])


def test_an_unknown_architecture_is_refused_with_the_nearest() -> None:
    with pytest.raises(ConversionError, match="no model 'resnet19'") as caught:
        open_source("resnet19", recipe())
    assert "did you mean 'resnet1" in caught.value.hint


# Detectors.


@pytest.mark.parametrize("shape", [(3, 100, 320), (1, 320, 320), (320, 320)])
def test_invalid_sizes_of_a_detector_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ConversionError) as caught:
        open_source("fasterrcnn_mobilenet_v3_large_320_fpn", recipe(shapes={"": shape}))
    assert "--shape 3x" in caught.value.hint


def test_an_unsupported_detector_is_refused() -> None:
    with pytest.raises(ConversionError, match="torchvision's object is not supported"):
        detector_module(object(), (64, 64))


@pytest.mark.parametrize(
    ("kind", "masks", "keypoints"),
    [("ssd", None, None), ("masked", "masks", None), ("keypoints", None, "keypoints")],
)
def test_the_task_names_masks_and_keypoints(kind: str, masks: str | None, keypoints: str | None) -> None:
    model = tiny_detector(kind)
    task = torchvision_detection._task(model)
    assert (task.masks, task.keypoints, task.mask_frame) == (masks, keypoints, "box")


# Segmenters.


def test_scores_of_a_segmenter_are_those_of_torchvision() -> None:
    source = open_segmenter("lraspp_mobilenet_v3_large", recipe(shapes={"": (3, 64, 96)}))
    image = np.random.default_rng(0).standard_normal((1, 3, 64, 96), np.float32)
    found = source.run({"image": image})
    with torch.inference_mode():
        expected = source.module.model(torch.from_numpy(image))["out"]  # type: ignore[operator]
    assert source.task == Segmentation(scores="scores")
    np.testing.assert_array_equal(found["scores"], expected.numpy())
    assert found["scores"].shape == (1, len(source.labels), 64, 96)
    assert source.preprocess is not None
    assert source.preprocess.letterbox is not None


# Weights of detectors and segmenters, also for other classes.

torchvision = import_torchvision()
SMALL = "lraspp_mobilenet_v3_large"


def saved(model: torch.nn.Module, folder: Path) -> Path:
    torch.save(model.state_dict(), folder / "weights.pth")
    return folder / "weights.pth"


def heads_of(trained: torch.nn.Module, model: Any, classes: int, folder: Path) -> dict[str, Any]:
    return trained_heads(model, saved(trained, folder), classes)


def resized(model: Any, name: str, factor: float, dimension: int = 0) -> Any:
    """The same model, one layer of which has another number of outputs."""
    layer = model.get_submodule(name)
    shape = list(layer.weight.shape)
    shape[dimension] = int(shape[dimension] * factor)
    layer.weight = torch.nn.Parameter(torch.zeros(shape))
    return model


@pytest.mark.parametrize(
    ("kind", "layer"),
    [
        ("ssd", "head.classification_head.module_list.0"),
        ("retinanet", "head.classification_head.cls_logits"),
        ("fcos", "head.classification_head.cls_logits"),
        ("faster", "roi_heads.box_predictor.cls_score"),
    ],
)
def test_weights_of_other_classes_are_recognized(kind: str, layer: str, tmp_path: Path) -> None:
    trained = resized(tiny_detector(kind), layer, 0.5)
    assert heads_of(trained, tiny_detector(kind), 4, tmp_path) == {"num_classes": 2}
    assert heads_of(tiny_detector(kind), tiny_detector(kind), 4, tmp_path) == {}


def test_other_keypoints_are_recognized(tmp_path: Path) -> None:
    trained = resized(tiny_detector("keypoints"), "roi_heads.keypoint_predictor.kps_score_lowres", 0.8, dimension=1)
    assert heads_of(trained, tiny_detector("keypoints"), 2, tmp_path) == {"num_keypoints": 4}


def test_the_auxiliary_head_of_published_weights_is_recognized(tmp_path: Path) -> None:
    plain = torch.nn.ModuleDict({"classifier": torch.nn.Sequential(*[torch.nn.Conv2d(2, 21, 1) for _ in range(5)])})
    trained = torch.nn.ModuleDict({**plain, "aux_classifier": torch.nn.Conv2d(2, 21, 1)})
    assert heads_of(trained, plain, 21, tmp_path) == {"aux_loss": True}
    assert heads_of(trained, trained, 21, tmp_path) == {}


def test_a_segmenter_is_built_for_the_classes_of_its_weights(tmp_path: Path) -> None:
    trained = torchvision.models.get_model(SMALL, weights=None, weights_backbone=None, num_classes=3)
    model, classes, names = build_model(SMALL, recipe(weights=saved(trained, tmp_path)))
    assert (classes, names) == (3, ())
    assert all(torch.equal(value, trained.state_dict()[key]) for key, value in model.state_dict().items())


def test_the_classes_are_torchvisions_without_weights(tmp_path: Path) -> None:
    model, classes, names = build_model(SMALL, recipe())
    assert (classes, names[:2]) == (21, ("__background__", "aeroplane"))
    path = saved(torch.nn.Linear(2, 2), tmp_path)
    with pytest.raises(ConversionError, match="are of another model"):
        build_model(SMALL, recipe(weights=path))
    assert not model.training
