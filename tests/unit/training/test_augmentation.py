"""Random transforms: what they leave alone, what they are by a formula, and that a seed repeats them."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from graphkiln.training.augmentation import random_affine

IDENTITY = {"angle": 0.0, "scale": (1.0, 1.0), "shift": 0.0}


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.fixture
def samples() -> torch.Tensor:
    return torch.rand(3, 1, 8, 8, generator=generator(1))


def test_no_transform_changes_nothing(samples: torch.Tensor) -> None:
    moved = random_affine(samples, 8, **IDENTITY, generator=generator())
    np.testing.assert_allclose(moved.numpy(), samples.numpy(), atol=1e-6)


def test_a_seed_repeats_it_and_another_does_not(samples: torch.Tensor) -> None:
    options = {"angle": 0.3, "scale": (0.8, 1.2), "shift": 0.2}
    first, again, other = (random_affine(samples, 8, **options, generator=generator(seed)) for seed in (4, 4, 5))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_samples_are_moved_independently(samples: torch.Tensor) -> None:
    same = samples[:1].repeat(2, 1, 1, 1)
    moved = random_affine(same, 8, angle=0.3, scale=(0.8, 1.2), shift=0.2, generator=generator())
    assert not torch.equal(moved[0], moved[1])


def test_a_scale_zooms_about_the_center() -> None:
    """A grid of half the size shows the middle, twice as large."""
    image = torch.zeros(1, 1, 8, 8)
    image[:, :, 2:6, 2:6] = 1.0
    zoomed = random_affine(image, 8, angle=0.0, scale=(0.5, 0.5), shift=0.0, generator=generator())
    np.testing.assert_allclose(zoomed[0, 0, 1:7, 1:7].numpy(), 1.0, atol=1e-6)


def test_the_border_is_replicated() -> None:
    image = torch.full((1, 1, 6, 6), 0.7)
    moved = random_affine(image, 6, angle=0.5, scale=(1.5, 2.0), shift=0.5, generator=generator())
    np.testing.assert_allclose(moved.numpy(), 0.7, atol=1e-6)
