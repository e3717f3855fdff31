"""Moves images at random, for the programs that train on digits."""

from __future__ import annotations

import torch
from torch import nn


def uniform(count: int, low: float, high: float, generator: torch.Generator) -> torch.Tensor:
    """Random numbers `[count]` between two bounds."""
    return torch.rand(count, generator=generator) * (high - low) + low


def moved(
    samples: torch.Tensor,
    side: int,
    *,
    angle: float,
    scale: tuple[float, float],
    shift: float,
    generator: torch.Generator,
) -> torch.Tensor:
    """Turned, scaled and shifted, each sample otherwise; what comes in from outside is the border's.

    Args:
        samples: `[count, 1, size, size]`.
        side: Size of the result.
        angle: Most that one is turned, in radians.
        scale: Least and largest scale.
        shift: Most that one is shifted, as a share of half its size.
        generator: Of the random numbers.

    Returns:
        `[count, 1, side, side]`.
    """
    count = len(samples)

    def draw(low: float, high: float) -> torch.Tensor:
        return uniform(count, low, high, generator)

    turn, zoom = draw(-angle, angle), draw(*scale)
    cos, sin = torch.cos(turn) * zoom, torch.sin(turn) * zoom
    rows = (cos, -sin, draw(-shift, shift), sin, cos, draw(-shift, shift))
    transform = torch.stack(rows, dim=1).view(count, 2, 3)
    grid = nn.functional.affine_grid(transform, [count, 1, side, side], align_corners=False)
    return nn.functional.grid_sample(samples, grid, padding_mode="border", align_corners=False)
