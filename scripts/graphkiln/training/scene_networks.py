"""Three small networks for scenes of digits: one finds them, one colours their pixels, one tells how alike they are."""

from __future__ import annotations

import torch
from torch import nn

STRIDE = 4
"""Pixels of the input to a cell of the detector's grid."""
DETECTIONS = 16
"""Rows that leave the graph for each image; those beyond the count are zero."""
KEPT_SCORE = 0.05
"""Detections below this score are not counted."""
_FAINTEST = 1e-4
"""Score of a digit where none was detected."""
_TIE_STEP = 1e-6
"""Between the scores of neighbouring cells: of equal ones, as integers make them, only one is a peak."""


def _block(inputs: int, outputs: int, stride: int = 1) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 3, stride=stride, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()
    )


class Pyramid(nn.Module):
    """Features of `[batch, 32, height / 4, width / 4]` from gray images, with a view of 16 x 16 cells around each."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(_block(1, 12, 2), _block(12, 24, 2))
        self.middle = nn.Sequential(_block(24, 40, 2), _block(40, 40))
        self.top = nn.Sequential(_block(40, 48, 2), _block(48, 48))
        self.from_stem, self.from_middle, self.from_top = (nn.Conv2d(width, 32, 1) for width in (24, 40, 48))

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        """From pixels in -1..1, `[batch, 1, height, width]`; sides are multiples of 16."""
        fine = self.stem(pixels)
        middle = self.middle(fine)
        merged = self.from_middle(middle) + _double(self.from_top(self.top(middle)))
        return torch.as_tensor(self.from_stem(fine) + _double(merged))


class SceneDetector(nn.Module):
    """Digits as peaks of a heat map, each with the distances from its cell to the four sides of its box.

    Source: Zhou, Wang, Krähenbühl, "Objects as Points", 2019 (peaks instead of non-maximum suppression).
    """

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.classes = classes
        self.pyramid = Pyramid()
        self.mix = _block(32, 32)
        self.heat = nn.Conv2d(32, classes, 1)
        self.sides = nn.Conv2d(32, 4, 1)
        nn.init.constant_(self.heat.bias, -4.0)  # type: ignore[arg-type]
        nn.init.constant_(self.sides.bias, 3.0)  # type: ignore[arg-type]

    def maps(self, pixels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits `[batch, classes, rows, columns]` and boxes in pixels `[batch, 4, rows, columns]`, for the loss."""
        features = self.mix(self.pyramid(pixels))
        left, top, right, bottom = (nn.functional.softplus(self.sides(features)) * STRIDE).unbind(dim=1)
        rows, columns = left.shape[-2:]
        y = (torch.arange(rows, dtype=torch.float32) + 0.5).view(1, rows, 1) * STRIDE
        x = (torch.arange(columns, dtype=torch.float32) + 0.5).view(1, 1, columns) * STRIDE
        return self.heat(features), torch.stack((x - left, y - top, x + right, y + bottom), dim=1)

    def forward(self, pixels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Boxes `[batch, 16, 4]`, scores and classes `[batch, 16]`, counts `[batch]`: best first, padded with zeros."""
        logits, boxes = self.maps(pixels)
        cells = logits.shape[-2] * logits.shape[-1]
        ordered = logits - _TIE_STEP * torch.arange(cells, dtype=torch.float32).view(1, 1, *logits.shape[-2:])
        heat = ordered.sigmoid()
        peaks = torch.where(heat == nn.functional.max_pool2d(heat, 3, 1, 1), heat, torch.zeros_like(heat))
        scores, indices = peaks.flatten(1).topk(DETECTIONS)
        found = scores >= KEPT_SCORE
        at = (indices % cells).unsqueeze(1).expand(-1, 4, -1)
        chosen = boxes.flatten(2).gather(2, at).transpose(1, 2)
        return (
            torch.where(found.unsqueeze(-1), chosen, torch.zeros_like(chosen)),
            torch.where(found, scores, torch.zeros_like(scores)),
            torch.where(found, indices // cells, torch.zeros_like(indices)),
            found.sum(dim=1).to(torch.int32),
        )


class Strokes(nn.Module):
    """How likely a pixel is ink, as logits `[batch, 1, height, width]`: by its brightness beside that around it."""

    def __init__(self) -> None:
        super().__init__()
        self.fine = nn.Sequential(nn.PixelUnshuffle(2), _block(4, 16))
        self.coarse = nn.Sequential(_block(16, 24, 2), _block(24, 24))
        self.draw = nn.Sequential(_block(16 + 24, 16), nn.Conv2d(16, 4, 1), nn.PixelShuffle(2))

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        """From pixels in -1..1, `[batch, 1, height, width]`; sides are multiples of 4."""
        fine = self.fine(pixels)
        return torch.as_tensor(self.draw(torch.cat((fine, _double(self.coarse(fine))), dim=1)))


class SceneSegmenter(nn.Module):
    """Scores `[batch, 1 + classes, height, width]`: ink within the box of a digit belongs to that digit.

    Source: Bolya et al., "YOLACT", 2019 (masks of the whole image, cut by what was detected).
    """

    def __init__(self, detector: SceneDetector) -> None:
        super().__init__()
        self.detector = detector.requires_grad_(requires_grad=False).eval()
        self.strokes = Strokes()

    def train(self, mode: bool = True) -> SceneSegmenter:
        """The detector is trained already: its batch norms stay as they are."""
        super().train(mode)
        self.detector.eval()
        return self

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        """From pixels in -1..1, `[batch, 1, height, width]`; sides are multiples of 16."""
        boxes, scores, classes, _ = self.detector(pixels)
        named = (classes.unsqueeze(-1) == torch.arange(self.detector.classes)).float() * scores.unsqueeze(-1)
        height, width = pixels.shape[-2:]
        digits = (named.transpose(1, 2) @ _inside(boxes, height, width)).unflatten(2, (height, width))
        ink = self.strokes(pixels)
        return torch.cat((-ink, ink + digits.clamp(_FAINTEST, 1).log()), dim=1)


def _inside(boxes: torch.Tensor, height: int, width: int) -> torch.Tensor:
    """1 for the pixels in each box and one around it, else 0: `[batch, detections, height * width]`."""
    x1, y1, x2, y2 = boxes.unsqueeze(-1).unbind(dim=2)
    x, y = (torch.arange(size, dtype=torch.float32) + 0.5 for size in (width, height))
    across, down = (x > x1 - 1) & (x < x2 + 1), (y > y1 - 1) & (y < y2 + 1)
    return (down.unsqueeze(-1) & across.unsqueeze(-2)).flatten(2).float()


class DigitEmbedding(nn.Module):
    """A vector of length one, `[batch, 32]`: the same digit points the same way."""

    def __init__(self, features: int = 32) -> None:
        super().__init__()
        self.blocks = nn.Sequential(_block(1, 16), _block(16, 32, 2), _block(32, 48, 2), _block(48, 64, 2))
        self.project = nn.Linear(64, features)

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        """From pixels in -1..1, `[batch, 1, 32, 32]`."""
        return nn.functional.normalize(self.project(self.blocks(pixels).mean(dim=(2, 3))), dim=1)


def _double(features: torch.Tensor) -> torch.Tensor:
    return nn.functional.interpolate(features, scale_factor=2.0, mode="nearest")
