"""The spec of torchvision's published transforms, and the labels of a classifier."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

from graphkiln_backend.graph.errors import ConversionError
from graphkiln_converters.sources import torchvision as source
from graphkiln_converters.sources.base import SourceOptions
from graphkiln_converters.sources.torchvision import open_source, preprocess_from_transforms


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
    def test_is_that_of_the_transforms(self) -> None:
        spec = preprocess_from_transforms(transforms(), (3, 224, 224))
        assert (spec.resize, spec.crop, spec.interpolation) == (256, (224, 224), "bilinear")
        assert (spec.mean, spec.std) == ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))

    @pytest.mark.parametrize(
        ("shape", "resize"),
        [((3, 112, 112), 128), ((3, 448, 448), 512), ((3, 64, 96), 73), ((3, 96, 64), 73), ((3, 1, 1), 1)],
    )
    def test_of_another_size_keeps_the_ratio_of_the_shorter_side(
        self, shape: tuple[int, int, int], resize: int
    ) -> None:
        spec = preprocess_from_transforms(transforms(), shape)
        assert (spec.resize, spec.crop) == (resize, shape[1:])

    @pytest.mark.parametrize("shape", [(224, 224), (3, 16, 224, 224), ()])
    def test_of_what_is_no_image(self, shape: tuple[int, ...]) -> None:
        with pytest.raises(ConversionError, match="an image has three dimensions, --shape gives"):
            preprocess_from_transforms(transforms(), shape)


class TestLabels:
    CATEGORIES = ("cat", "dog", "newt")

    @pytest.mark.parametrize(
        ("module", "labels"),
        [
            (nn.Sequential(nn.Conv2d(3, 8, 3), nn.Linear(8, 3)), CATEGORIES),
            (nn.Sequential(nn.Linear(8, 3), nn.Linear(3, 2)), ()),
            (nn.Sequential(nn.Linear(8, 8), nn.Conv2d(8, 3, 1), nn.ReLU()), CATEGORIES),
        ],
    )
    def test_only_for_as_many_outputs(self, module: nn.Module, labels: tuple[str, ...]) -> None:
        assert source._labels(module, list(self.CATEGORIES)) == labels


def test_an_unknown_architecture() -> None:
    with pytest.raises(ConversionError, match="no model 'resnet19'") as caught:
        open_source("resnet19", SourceOptions())
    assert "did you mean 'resnet1" in caught.value.hint
