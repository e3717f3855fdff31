"""Parts of the training of the digits model."""

from __future__ import annotations

import numpy as np
import torch

from training.train_digits import augment


def test_augmentation_inverts_about_half_of_the_samples() -> None:
    samples = torch.full((400, 1, 8, 8), 0.5)
    found = augment(samples, torch.Generator().manual_seed(0))
    signs = found.mean(dim=(1, 2, 3)).sign()
    np.testing.assert_allclose(found.abs().numpy(), 0.5, atol=1e-6)
    assert 150 < int((signs < 0).sum()) < 250
