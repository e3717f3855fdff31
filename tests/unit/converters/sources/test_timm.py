"""Creating architectures of timm."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from recipes import recipe
from torch import nn

from graphkiln_backend.graph.errors import ConversionError
from graphkiln_converters.sources import timm as source
from graphkiln_converters.sources.timm import open_source


class TestCreation:
    @pytest.mark.parametrize("error", [RuntimeError, TypeError])
    def test_invalid_options_are_refused(self, error: type[Exception], monkeypatch: pytest.MonkeyPatch) -> None:
        def fails(*_: Any, **__: Any) -> nn.Module:
            raise error("no feature maps")

        monkeypatch.setattr(source.timm, "create_model", fails)
        with pytest.raises(ConversionError, match="timm cannot create resnet18 with these options: no feature maps"):
            source._create("resnet18", recipe())

    def test_a_failed_download_suggests_weights(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def fails(*_: Any, **__: Any) -> nn.Module:
            raise OSError("no route to host")

        monkeypatch.setattr(source.timm, "create_model", fails)
        with pytest.raises(ConversionError, match="cannot download the weights of resnet18") as caught:
            source._create("resnet18", recipe(pretrained=True))
        assert "--weights FILE" in caught.value.hint


def test_an_architecture_with_another_image_size() -> None:
    before = torch.random.get_rng_state()
    model = open_source("test_resnet", recipe(shapes={"": (3, 64, 64)}))
    torch.random.set_rng_state(before)
    assert model.inputs[0].shape == (3, 64, 64)
    assert len(model.labels) in (0, 1000)
    assert model.random_weights
    assert not model.module.training
