"""Small modules, each with one property that a converter may get wrong."""

from __future__ import annotations

import torch
from torch import nn


class Small(nn.Module):
    """`[batch, 3, 16, 16]` -> `[batch, 5]`, with a batch norm, padding and a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, bias=False)
        self.norm = nn.BatchNorm2d(8)
        self.head = nn.Linear(8, 5)
        nn.init.uniform_(self.norm.running_mean, -1, 1)
        nn.init.uniform_(self.norm.running_var, 1e-4, 2e-4)  # as small as epsilon times ten: epsilon matters

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        features = self.norm(self.conv(nn.functional.pad(image, (1, 1, 1, 1))))
        return self.head((features.relu() + features).mean(dim=(2, 3)))  # type: ignore[no-any-return]


class Pair(nn.Module):
    """Two inputs, two outputs by name."""

    def forward(self, left: torch.Tensor, right: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"sum": left + right, "product": left * right.float()}


class Branching(nn.Module):
    """Its path depends on a value."""

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        return image * 2 if image.sum() > 0 else image - 1


class Baked(nn.Module):
    """Takes batches of two only."""

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        return image.reshape(2, -1, 3).sum(dim=1)


class Odd(nn.Module):
    """Uses an operator that ONNX lacks."""

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        return torch.special.bessel_j1(image)


def small() -> nn.Module:
    torch.manual_seed(1)
    return Small()


def shaped() -> tuple[nn.Module, torch.Tensor]:
    return small(), torch.zeros(1, 3, 16, 16)


def pair() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    return Pair(), {"left": torch.ones(2, 4), "right": torch.full((2, 4), 9)}


def branching() -> tuple[nn.Module, torch.Tensor]:
    return Branching(), torch.zeros(2, 4)


def baked() -> tuple[nn.Module, torch.Tensor]:
    return Baked(), torch.zeros(2, 6, 3)


def odd() -> tuple[nn.Module, torch.Tensor]:
    return Odd(), torch.zeros(2, 4)


class BakedHeight(nn.Module):
    """Takes images of 16 rows only."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 2)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        return self.linear(image.sum(dim=(1, 3)))  # type: ignore[no-any-return]


def baked_height() -> tuple[nn.Module, torch.Tensor]:
    return BakedHeight(), torch.zeros(2, 3, 16, 16)


class Overflowing(nn.Module):
    """A layer returns values above 65504, which the next one scales down."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.large, self.back = nn.Linear(8, 16), nn.Linear(16, 16), nn.Linear(16, 4)
        nn.init.uniform_(self.large.weight, 2e4, 4e4)
        nn.init.uniform_(self.back.weight, -1e-4, 1e-4)

    def forward(self, row: torch.Tensor) -> torch.Tensor:
        return self.back(self.large(self.first(row).relu()))  # type: ignore[no-any-return]


def overflowing() -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(3)
    return Overflowing(), torch.zeros(2, 8)


class Pooling(nn.Module):
    """Strided and grouped convolutions, pooling, normalization and activations, one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            *(nn.Conv2d(3, 8, 3, stride=2, padding=1), nn.BatchNorm2d(8), nn.SiLU(), nn.MaxPool2d(3, 2, padding=1)),
            *(nn.Conv2d(8, 8, 3, padding=2, dilation=2, groups=4), nn.GroupNorm(2, 8), nn.Hardswish()),
            *(nn.AvgPool2d(2), nn.Flatten(), nn.LayerNorm(32), nn.GELU(), nn.Linear(32, 5)),
        )

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        return self.body(image)  # type: ignore[no-any-return]


def pooling() -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(2)
    return Pooling(), torch.zeros(2, 3, 16, 16)


class Inception(nn.Module):
    """Branches that are joined, a transposed convolution, and a softmax."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Conv2d(3, 4, 1), nn.Conv2d(3, 4, 3, padding=1)
        self.norm, self.up = nn.BatchNorm2d(8), nn.ConvTranspose2d(8, 2, 2, stride=2)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        joined = self.norm(torch.cat([self.left(image), self.right(image)], dim=1)).relu()
        return self.up(joined).flatten(1)[:, :40].softmax(dim=1)[:, :3]  # type: ignore[no-any-return]


def inception() -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(4)
    return Inception(), torch.zeros(2, 3, 16, 16)
