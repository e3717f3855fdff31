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


@pytest.mark.parametrize(
    ("error", "message", "hint"),
    [
        (TypeError("no feature maps"), "timm cannot create resnet18 with these options: no feature maps", ""),
        (OSError("no route to host"), "cannot download the weights of resnet18", "--weights FILE"),
    ],
)
def test_errors_of_timm_are_translated(
    error: Exception, message: str, hint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> nn.Module:
        raise error

    monkeypatch.setattr(source.timm, "create_model", fail)
    with pytest.raises(ConversionError, match=message) as caught:
        open_source("resnet18", recipe(pretrained=True))
    assert hint in caught.value.hint


def test_an_architecture_with_another_image_size() -> None:
    before = torch.random.get_rng_state()
    model = open_source("test_resnet", recipe(shapes={"": (3, 64, 64)}))
    torch.random.set_rng_state(before)
    assert model.inputs[0].shape == (3, 64, 64)
    assert len(model.labels) in (0, 1000)
    assert model.random_weights
    assert not model.module.training
