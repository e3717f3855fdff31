"""A small classifier of digits with the patterns that the story's fusions need: padding and an added constant."""

from __future__ import annotations

import torch
from torch import nn

IMAGE_SIZE = 32
PREPROCESS = {"resize": 32, "crop": [32, 32], "mean": [0.5, 0.5, 0.5], "std": [0.5, 0.5, 0.5]}


class Shift(nn.Module):
    """Add a constant to every channel."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.register_buffer("by", torch.linspace(-0.5, 0.5, channels).view(1, -1, 1, 1))

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        return features + self.by  # type: ignore[no-any-return, operator]


class Net(nn.Module):
    """Map `[batch, 3, 32, 32]` to `[batch, 10]` scores."""

    def __init__(self, *, padded: bool = True) -> None:
        super().__init__()
        blocks: list[nn.Module] = []
        for before, after in ((3, 16), (16, 32), (32, 64)):
            padding = 0 if padded else 1
            blocks += [nn.ZeroPad2d(1) if padded else nn.Identity()]
            blocks += [nn.Conv2d(before, after, 3, stride=2, padding=padding, bias=False), Shift(after)]
            blocks += [nn.BatchNorm2d(after), nn.ReLU()]
        self.features = nn.Sequential(*blocks)
        self.head = nn.Linear(64, 10)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        return self.head(self.features(image).mean(dim=(2, 3)))  # type: ignore[no-any-return]


def net() -> nn.Module:
    torch.manual_seed(0)
    return Net()


def unpadded() -> nn.Module:
    """Make the same network with padding inside of its convolutions: explicit padding has no gradient graph."""
    return Net(padded=False)


def trained(pixels: torch.Tensor, targets: torch.Tensor) -> dict[str, torch.Tensor]:
    """Train the network on digits for some seconds; return its state."""
    module = net()
    generator = torch.Generator().manual_seed(0)
    optimizer = torch.optim.AdamW(module.parameters(), lr=3e-3)
    for _ in range(25):
        for rows in torch.randperm(len(pixels), generator=generator).split(64):
            loss = nn.functional.cross_entropy(module(pixels[rows]), targets[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return module.state_dict()
