"""Weights of torchvision's detectors and segmenters, also those that were trained for other classes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_detectors import tiny_detector

from graphkiln_backend.graph.errors import ConversionError
from graphkiln_converters.sources.base import SourceOptions
from graphkiln_converters.sources.torchvision_heads import build_model, trained_heads
from graphkiln_converters.torch_libraries import import_torchvision

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


def test_the_auxiliary_head_of_published_weights_is_no_other_architecture(tmp_path: Path) -> None:
    plain = torch.nn.ModuleDict({"classifier": torch.nn.Sequential(*[torch.nn.Conv2d(2, 21, 1) for _ in range(5)])})
    trained = torch.nn.ModuleDict({**plain, "aux_classifier": torch.nn.Conv2d(2, 21, 1)})
    assert heads_of(trained, plain, 21, tmp_path) == {"aux_loss": True}
    assert heads_of(trained, trained, 21, tmp_path) == {}


def test_a_segmenter_of_three_classes_is_built_for_them(tmp_path: Path) -> None:
    trained = torchvision.models.get_model(SMALL, weights=None, weights_backbone=None, num_classes=3)
    model, classes, names = build_model(SMALL, SourceOptions(weights=saved(trained, tmp_path)))
    assert (classes, names) == (3, ())
    assert all(torch.equal(value, trained.state_dict()[key]) for key, value in model.state_dict().items())


def test_without_weights_the_classes_are_torchvisions(tmp_path: Path) -> None:
    model, classes, names = build_model(SMALL, SourceOptions())
    assert (classes, names[:2]) == (21, ("__background__", "aeroplane"))
    path = saved(torch.nn.Linear(2, 2), tmp_path)
    with pytest.raises(ConversionError, match="are of another model"):
        build_model(SMALL, SourceOptions(weights=path))
    assert not model.training
