"""A training step as one graph, compared with autograd."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from graphkiln.story.training_step import TrainingStep
from graphkiln_backend.engines.onnxruntime import OnnxRuntimeEngine
from graphkiln_backend.graph.dtypes import AnyArray
from graphkiln_backend.graph.errors import ConversionError
from graphkiln_backend.passes.base import run_passes
from graphkiln_backend.passes.graph_file import save
from graphkiln_backend.passes.pipeline import OPTIMIZATIONS
from graphkiln_converters.sources.base import InputSpec
from graphkiln_converters.sources.pytorch import TorchModel, freeze

pytestmark = pytest.mark.slow


class Everything(nn.Module):
    """Strided, dilated, grouped, depthwise and transposed convolutions, and normalizations."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 8, 3, stride=2, padding=1, bias=False),
            nn.BatchNorm2d(8),
            nn.ReLU(inplace=True),
            nn.Conv2d(8, 8, 3, padding=2, dilation=2),
            nn.Conv2d(8, 8, 3, padding=1, groups=4),
            nn.GELU(),
            nn.Conv2d(8, 8, 3, padding=1, groups=8),
            nn.Conv2d(8, 12, 1),
            nn.ConvTranspose2d(12, 6, 2, stride=2),
            nn.MaxPool2d(2),
            nn.BatchNorm2d(6),
        )
        self.norm = nn.LayerNorm(6)
        self.head = nn.Linear(6, 5)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        """`[batch, 3, 16, 16]` to `[batch, 5]`."""
        scores: torch.Tensor = self.head(self.norm(self.features(image).mean(dim=(2, 3))))
        return scores


def step(module: nn.Module) -> TrainingStep:
    torch.manual_seed(0)
    for layer in module.modules():
        if isinstance(layer, nn.BatchNorm2d):
            layer.running_mean.normal_()  # type: ignore[union-attr, operator]
            layer.running_var.uniform_(0.5, 2)  # type: ignore[union-attr, operator]
            nn.init.uniform_(layer.weight, 0.5, 2)
    inputs = (InputSpec(name="image", shape=(3, 16, 16)),)
    return TrainingStep(
        model=TorchModel(module=freeze(module), description="a test", libraries=("torch",), inputs=inputs)
    )


def exported(asked: TrainingStep, path: Path, feeds: dict[str, AnyArray]) -> tuple[AnyArray, dict[str, AnyArray]]:
    graph, names = asked.export()
    run_passes(graph, OPTIMIZATIONS)
    save(graph, path)
    with OnnxRuntimeEngine().build_reference(path) as session:
        scores, *gradients = session.run(feeds).values()
    return scores, dict(zip(names, gradients, strict=True))


def test_outputs_and_gradients_are_those_of_autograd(tmp_path: Path) -> None:
    asked = step(Everything())
    feeds = {"image": np.random.default_rng(0).normal(size=(1, 3, 16, 16)).astype(np.float32)}
    answers, derived = asked.run(feeds)
    scores, gradients = exported(asked, tmp_path / "model.onnx", feeds)
    np.testing.assert_allclose(scores, answers["output"], rtol=1e-4, atol=1e-5)
    assert set(gradients) == set(derived) == {name for name, _ in asked.model.module.named_parameters()}
    for name, gradient in gradients.items():
        assert gradient.shape == derived[name].shape, name
        np.testing.assert_allclose(gradient, derived[name], rtol=1e-3, atol=1e-4, err_msg=name)


def test_eager_steps_leave_the_model_unchanged() -> None:
    asked = step(Everything())
    before = {name: value.clone() for name, value in asked.model.module.state_dict().items()}
    asked.repeat({"image": np.ones((1, 3, 16, 16), np.float32)}, by_input=True)
    after = asked.model.module.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert not asked.model.module.training


def test_a_model_that_cannot_be_differentiated_is_refused() -> None:
    class Rounded(nn.Module):
        def forward(self, image: torch.Tensor) -> torch.Tensor:
            return torch.from_numpy(image.detach().numpy()).sum(dim=(2, 3))

    with pytest.raises(ConversionError, match="no gradient graph for a test"):
        step(Rounded()).export()
