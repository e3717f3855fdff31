"""Parts of the training of the story's weights."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file
from torch import nn

from graphkiln_backend.graph.preprocess import Preprocess
from training.train_story import (
    normalize,
    recompute_statistics,
    save_weights,
    top1_accuracy,
)

PUBLISHED = Preprocess(mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225))


def test_normalize() -> None:
    gray = torch.full((1, 1, 2, 2), 0.5)
    found = normalize(gray, PUBLISHED)
    expected = (0.5 - np.array(PUBLISHED.mean)) / np.array(PUBLISHED.std)
    assert found.shape == (1, 3, 2, 2)
    np.testing.assert_allclose(found[0, :, 0, 0].numpy(), expected, rtol=1e-6)


class Brightness(nn.Module):
    """A classifier of dark and bright images."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(3)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        mean = self.norm(images).mean(dim=(1, 2, 3))
        return torch.stack([-mean, mean], dim=1)


def test_recompute_statistics() -> None:
    network = Brightness()
    samples = torch.rand(96, 1, 4, 4, generator=torch.Generator().manual_seed(0))
    recompute_statistics(network, samples, Preprocess(mean=(0.0,) * 3, std=(1.0,) * 3))
    np.testing.assert_allclose(network.norm.running_mean.numpy(), float(samples.mean()), atol=5e-3)
    assert network.norm.momentum == 0.1


def test_accuracy() -> None:
    network, published = Brightness(), Preprocess(mean=(0.5,) * 3, std=(1.0,) * 3)
    samples = torch.tensor([0.1, 0.9, 0.2, 0.8]).view(4, 1, 1, 1).expand(4, 1, 4, 4)
    assert top1_accuracy(network, samples, torch.tensor([0, 1, 0, 1]), published) == 1.0
    assert top1_accuracy(network, samples, torch.tensor([0, 1, 1, 1]), published) == 0.75


def test_weights_are_written_whole(tmp_path: Path) -> None:
    network = Brightness()
    path = tmp_path / "new" / "w.safetensors"
    save_weights(network, path)
    assert [each.name for each in path.parent.iterdir()] == ["w.safetensors"]
    loaded = load_file(path)
    assert set(loaded) == set(network.state_dict())
    assert all(torch.equal(loaded[name], value) for name, value in network.state_dict().items())
