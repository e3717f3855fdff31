"""The eager training step."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from graphkiln.story.training_step import TrainingStep, _trainable_norm
from graphkiln_converters.sources.base import InputSpec
from graphkiln_converters.sources.pytorch import TorchModel, freeze

FEEDS = {"row": np.array([[1, 2, 3]], "f4")}


class Heads(nn.Module):
    """Two outputs, and an unused parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 2), nn.Linear(3, 1)
        self.unused = nn.Parameter(torch.ones(1))

    def forward(self, row: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"scores": self.first(row), "value": self.second(row)}


@pytest.fixture
def step() -> TrainingStep:
    torch.manual_seed(0)
    inputs = (InputSpec(name="row", shape=(3,)),)
    return TrainingStep(model=TorchModel(module=freeze(Heads()), description="heads", libraries=(), inputs=inputs))


def test_gradients_of_first_output(step: TrainingStep) -> None:
    outputs, gradients = step.run(FEEDS)
    assert list(outputs) == ["scores", "value"]
    assert set(gradients) == {"first.weight", "first.bias"}
    np.testing.assert_array_equal(gradients["first.weight"], [[1, 2, 3], [1, 2, 3]])
    np.testing.assert_array_equal(gradients["first.bias"], [1, 1])


def test_model_is_frozen_again_after_an_error(step: TrainingStep) -> None:
    with pytest.raises(RuntimeError):
        step.run({"row": np.zeros((1, 7), "f4")})
    assert not any(parameter.requires_grad for parameter in step.model.module.parameters())


@pytest.mark.parametrize("by_input", [True, False])
def test_repeat_changes_only_gradients(step: TrainingStep, by_input: bool) -> None:
    before = {name: value.clone() for name, value in step.model.module.state_dict().items()}
    step.repeat(FEEDS, by_input=by_input)
    assert all(torch.equal(before[name], value) for name, value in step.model.module.state_dict().items())
    assert step.model.module.get_parameter("first.weight").grad is not None


class TestNorms:
    def norm(self, *, affine: bool) -> nn.BatchNorm2d:
        norm = nn.BatchNorm2d(3, affine=affine, eps=1e-3).eval()
        torch.manual_seed(0)
        for tensor in (*norm.parameters(), *norm.buffers()):
            if tensor.is_floating_point():
                nn.init.uniform_(tensor, 0.5, 2)
        return norm

    def test_trainable_norm_equals_batch_norm(self) -> None:
        norm, x = self.norm(affine=True), torch.randn(2, 3, 4, 4)
        made = _trainable_norm(norm)
        torch.testing.assert_close(made(x), norm(x))
        for found, expected in zip(made.parameters(), norm.parameters(), strict=True):
            (derived,) = torch.autograd.grad((made(x) ** 2).sum(), found)
            (reference,) = torch.autograd.grad((norm(x) ** 2).sum(), expected)
            torch.testing.assert_close(derived, reference)
