"""Random affine transforms of image batches."""

from __future__ import annotations

import torch
from torch import nn


def random_uniform(count: int, low: float, high: float, generator: torch.Generator) -> torch.Tensor:
    """Draw uniform random numbers in `low..high`, `[count]`."""
    return torch.rand(count, generator=generator) * (high - low) + low


def random_affine(
    samples: torch.Tensor,
    side: int,
    *,
    angle: float,
    scale: tuple[float, float],
    shift: float,
    generator: torch.Generator,
) -> torch.Tensor:
    """Rotate, scale and shift each sample by random amounts, with replicated borders.

    Args:
        samples: Images, `[count, 1, size, size]`.
        side: Height and width of the result in pixels.
        angle: Maximum rotation in radians, in either direction.
        scale: Minimum and maximum scale of the sampling grid.
        shift: Maximum shift, relative to half the size.
        generator: Random number generator.

    Returns:
        `[count, 1, side, side]`.
    """
    count = len(samples)

    def draw(low: float, high: float) -> torch.Tensor:
        return random_uniform(count, low, high, generator)

    turn, zoom = draw(-angle, angle), draw(*scale)
    cos, sin = torch.cos(turn) * zoom, torch.sin(turn) * zoom
    rows = (cos, -sin, draw(-shift, shift), sin, cos, draw(-shift, shift))
    transform = torch.stack(rows, dim=1).view(count, 2, 3)
    grid = nn.functional.affine_grid(transform, [count, 1, side, side], align_corners=False)
    return nn.functional.grid_sample(samples, grid, padding_mode="border", align_corners=False)
