"""Scenes composed of scikit-learn's handwritten digits with exact boxes and masks, and three small networks for them.

Sizes and brightness of the digits vary, and backgrounds are uneven and noisy. Digits of held-out scenes do not occur in
training scenes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from graphkiln.story.digits import digit_image

SIDE = 96  # height and width of a scene in pixels
OBJECTS = (1, 5)  # minimum and maximum number of digits; digits without free space are omitted
_DIGIT_SIDES = (22, 44)
_STROKE = 0.5  # minimum brightness of a digit's pixel, relative to its brightest pixel
_BACKGROUND = (10.0, 70.0)
_INK = (110.0, 180.0)
_NOISE = 3.0
_ATTEMPTS = 20
_HELD_OUT = 4  # every 4th digit is held out

Digits = npt.NDArray[np.float64]
Generator = np.random.Generator


@dataclass(frozen=True, kw_only=True, slots=True)
class Scene:
    """An image with its objects.

    Attributes:
        pixels: Gray levels, uint8 `[height, width]`.
        boxes: Bounding box of each digit's strokes, x1, y1, x2, y2 in pixels, float32 `[digits, 4]`.
        classes: Value of each digit, int64 `[digits]`.
        segmentation: Class of each pixel: 0 for background, otherwise 1 + value of the digit, uint8 `[height, width]`.
    """

    pixels: npt.NDArray[np.uint8]
    boxes: npt.NDArray[np.float32]
    classes: npt.NDArray[np.int64]
    segmentation: npt.NDArray[np.uint8]


def compose_scenes(count: int, *, seed: int, held_out: bool = False) -> list[Scene]:
    """Compose scenes of the held-out digits, or of all others, from a seed."""
    images, values = digit_rows(held_out)
    generator = np.random.default_rng(seed)
    return [compose(images, values, generator) for _ in range(count)]


def compose(digits: Digits, values: Sequence[int] | npt.NDArray[np.int64], generator: Generator) -> Scene:
    """Compose one scene of digits, `[digits, 8, 8]` in 0..16, with their values 0..9."""
    canvas = _background(generator)
    segmentation = np.zeros((SIDE, SIDE), np.uint8)
    boxes: list[tuple[int, int, int, int]] = []
    classes: list[int] = []
    for _ in range(generator.integers(OBJECTS[0], OBJECTS[1] + 1)):
        row = int(generator.integers(len(digits)))
        ink = _draw_digit(digits[row], generator)
        place = _free_place(ink.shape, boxes, generator)
        if place is None:
            continue
        top, left = place
        height, width = ink.shape
        canvas[top : top + height, left : left + width] += ink * generator.uniform(*_INK)
        stroke = ink > _STROKE
        segmentation[top : top + height, left : left + width][stroke] = values[row] + 1
        boxes.append(_bounds(stroke, top, left))
        classes.append(int(values[row]))
    noisy = canvas + generator.normal(0, _NOISE, canvas.shape)
    return Scene(
        pixels=noisy.round().clip(0, 255).astype(np.uint8),
        boxes=np.array(boxes, np.float32).reshape(-1, 4),
        classes=np.array(classes, np.int64),
        segmentation=segmentation,
    )


def digit_rows(held_out: bool) -> tuple[Digits, npt.NDArray[np.int64]]:
    """Load the held-out digits, or all others: images in 0..16, `[digits, 8, 8]`, and their values."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    chosen = (np.arange(len(digits.images)) % _HELD_OUT == 0) == held_out
    return digits.images[chosen], digits.target[chosen].astype(np.int64)


def _background(generator: Generator) -> npt.NDArray[np.float64]:
    """Create a brightness gradient, `[height, width]`."""
    level, slope = generator.uniform(*_BACKGROUND), generator.uniform(-25, 25, 2)
    rows, columns = np.mgrid[0:SIDE, 0:SIDE] / SIDE - 0.5
    return np.asarray(level + slope[0] * rows + slope[1] * columns)


def _draw_digit(digit: npt.NDArray[np.float64], generator: Generator) -> npt.NDArray[np.float64]:
    """Draw a digit with random size and aspect ratio, in 0..1, `[height, width]`."""
    side = int(generator.integers(_DIGIT_SIDES[0], _DIGIT_SIDES[1] + 1))
    width = max(8, round(side * generator.uniform(0.8, 1.1)))
    ink = np.asarray(digit_image(digit, side).resize((width, side)), np.float64)
    return np.asarray(ink / ink.max())


def _free_place(
    shape: tuple[int, ...], boxes: Sequence[tuple[int, int, int, int]], generator: Generator
) -> tuple[int, int] | None:
    """Find top and left of a random place that overlaps no box, or None."""
    height, width = shape
    for _ in range(_ATTEMPTS):
        top, left = (int(generator.integers(0, SIDE - length + 1)) for length in (height, width))
        if all(left >= x2 or left + width <= x1 or top >= y2 or top + height <= y1 for x1, y1, x2, y2 in boxes):
            return top, left
    return None


def _bounds(stroke: npt.NDArray[np.bool_], top: int, left: int) -> tuple[int, int, int, int]:
    """Compute the bounding box of a stroke as x1, y1, x2, y2."""
    rows, columns = np.flatnonzero(stroke.any(axis=1)), np.flatnonzero(stroke.any(axis=0))
    return left + int(columns[0]), top + int(rows[0]), left + int(columns[-1]) + 1, top + int(rows[-1]) + 1


STRIDE = 4  # input pixels per cell of the detector's grid
DETECTIONS = 16  # maximum number of detections per image; unused rows are zero
MIN_SCORE = 0.05
_NO_SCORE = 1e-9  # score of a digit outside of all boxes
_CONFIDENT = 0.3  # minimum score of boxes that are used to normalize the brightness
_MARGIN = 2.0  # pixels around a box that may belong to its digit
_MIN_CONTRAST = 0.1
_TIE_STEP = 1e-6  # breaks ties between neighbouring cells, which occur with integer arithmetic


def _block(inputs: int, outputs: int, stride: int = 1) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 3, stride=stride, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()
    )


class Pyramid(nn.Module):
    """Feature pyramid: gray images to features, `[batch, 32, height / 4, width / 4]`."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(_block(1, 12, 2), _block(12, 24, 2))
        self.middle = nn.Sequential(_block(24, 40, 2), _block(40, 40))
        self.top = nn.Sequential(_block(40, 48, 2), _block(48, 48))
        self.from_stem, self.from_middle, self.from_top = (nn.Conv2d(width, 32, 1) for width in (24, 40, 48))

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        """Take pixels in -1..1, `[batch, 1, height, width]`, with sides that are multiples of 16."""
        fine = self.stem(pixels)
        middle = self.middle(fine)
        merged = self.from_middle(middle) + _double(self.from_top(self.top(middle)))
        return torch.as_tensor(self.from_stem(fine) + _double(merged))


class SceneDetector(nn.Module):
    """Detector with a heat map of digit centres, and the distances from each cell to the four sides of its box.

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
        """Compute logits `[batch, classes, rows, columns]` and boxes in pixels `[batch, 4, rows, columns]`."""
        features = self.mix(self.pyramid(pixels))
        left, top, right, bottom = (nn.functional.softplus(self.sides(features)) * STRIDE).unbind(dim=1)
        rows, columns = left.shape[-2:]
        y = (torch.arange(rows, dtype=torch.float32) + 0.5).view(1, rows, 1) * STRIDE
        x = (torch.arange(columns, dtype=torch.float32) + 0.5).view(1, 1, columns) * STRIDE
        return self.heat(features), torch.stack((x - left, y - top, x + right, y + bottom), dim=1)

    def forward(self, pixels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return boxes `[batch, 16, 4]`, scores and classes `[batch, 16]`, and counts `[batch]`, best first."""
        logits, boxes = self.maps(pixels)
        cells = logits.shape[-2] * logits.shape[-1]
        ordered = logits - _TIE_STEP * torch.arange(cells, dtype=torch.float32).view(1, 1, *logits.shape[-2:])
        heat = ordered.sigmoid()
        peaks = torch.where(heat == nn.functional.max_pool2d(heat, 3, 1, 1), heat, torch.zeros_like(heat))
        scores, indices = peaks.flatten(1).topk(DETECTIONS)
        found = scores >= MIN_SCORE
        at = (indices % cells).unsqueeze(1).expand(-1, 4, -1)
        chosen = boxes.flatten(2).gather(2, at).transpose(1, 2)
        return (
            torch.where(found.unsqueeze(-1), chosen, torch.zeros_like(chosen)),
            torch.where(found, scores, torch.zeros_like(scores)),
            torch.where(found, indices // cells, torch.zeros_like(indices)),
            found.sum(dim=1).to(torch.int32),
        )


class Strokes(nn.Module):
    """Ink segmentation: logits for each pixel, `[batch, 1, height, width]`."""

    def __init__(self) -> None:
        super().__init__()
        self.fine = nn.Sequential(nn.PixelUnshuffle(2), _block(8, 24))
        self.coarse = nn.Sequential(_block(24, 32, 2), _block(32, 32))
        self.draw = nn.Sequential(_block(24 + 32, 24), nn.Conv2d(24, 4, 1), nn.PixelShuffle(2))

    def forward(self, levels: torch.Tensor) -> torch.Tensor:
        """Take pixels and their relief in -1..1, `[batch, 2, height, width]`, with sides that are multiples of 4."""
        fine = self.fine(levels)
        return torch.as_tensor(self.draw(torch.cat((fine, _double(self.coarse(fine))), dim=1)))


class SceneSegmenter(nn.Module):
    """Segmenter with scores `[batch, 1 + classes, height, width]`: ink within a digit's box belongs to the digit.

    The brightness of a digit is normalized within its box.

    Source: Bolya et al., "YOLACT", 2019 (masks of the whole image, cropped by the detections).
    """

    def __init__(self, detector: SceneDetector) -> None:
        super().__init__()
        self.detector = detector.requires_grad_(requires_grad=False).eval()
        self.strokes = Strokes()

    def train(self, mode: bool = True) -> SceneSegmenter:
        """Keep the trained detector in evaluation mode."""
        super().train(mode)
        self.detector.eval()
        return self

    def levels(self, pixels: torch.Tensor) -> torch.Tensor:
        """Compute the input of `Strokes`."""
        boxes, scores, _, _ = self.detector(pixels)
        return torch.cat((pixels, relief(pixels, boxes, scores)), dim=1)

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        """Take pixels in -1..1, `[batch, 1, height, width]`, with sides that are multiples of 16."""
        boxes, scores, classes, _ = self.detector(pixels)
        ink = self.strokes(torch.cat((pixels, relief(pixels, boxes, scores)), dim=1))
        named = (classes.unsqueeze(-1) == torch.arange(self.detector.classes)).float() * scores.unsqueeze(-1)
        height, width = pixels.shape[-2:]
        within = (_inside(boxes, height, width, 0).float() + _inside(boxes, height, width, _MARGIN).float()) / 2
        digits = (named.transpose(1, 2) @ within).unflatten(2, (height, width))
        shares = digits / digits.amax(dim=1, keepdim=True).clamp(min=_CONFIDENT)
        return torch.cat((-ink, ink + shares.clamp(min=_NO_SCORE).log()), dim=1)


def relief(pixels: torch.Tensor, boxes: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    """Normalize each pixel between the darkest and the brightest pixel of its box.

    Args:
        pixels: In -1..1, `[batch, 1, height, width]`.
        boxes: In pixels, `[batch, detections, 4]`.
        scores: `[batch, detections]`.

    Returns:
        Values from -1 to 1, `[batch, 1, height, width]`; -1 outside of all boxes, the maximum in overlapping boxes.
    """
    height, width = pixels.shape[-2:]
    inside, flat = _inside(boxes, height, width, _MARGIN), pixels.flatten(2)
    low = torch.where(inside, flat, torch.ones_like(flat)).amin(dim=2, keepdim=True)
    high = torch.where(inside, flat, -torch.ones_like(flat)).amax(dim=2, keepdim=True)
    place = (2 * flat - high - low) / (high - low).clamp(min=_MIN_CONTRAST)
    sure = inside & (scores >= _CONFIDENT).unsqueeze(-1)
    found = torch.where(sure, place, -torch.ones_like(place)).amax(dim=1, keepdim=True)
    return found.reshape(-1, 1, height, width)


def _inside(boxes: torch.Tensor, height: int, width: int, margin: float) -> torch.Tensor:
    """Mark the pixels in each box and its margin: bool `[batch, detections, height * width]`."""
    x1, y1, x2, y2 = boxes.unsqueeze(-1).unbind(dim=2)
    x, y = (torch.arange(size, dtype=torch.float32) + 0.5 for size in (width, height))
    across, down = (x > x1 - margin) & (x < x2 + margin), (y > y1 - margin) & (y < y2 + margin)
    return (down.unsqueeze(-1) & across.unsqueeze(-2)).flatten(2)


class DigitEmbedding(nn.Module):
    """Embedding network with vectors of length one, `[batch, 32]`."""

    def __init__(self, features: int = 32) -> None:
        super().__init__()
        self.blocks = nn.Sequential(_block(1, 16), _block(16, 32, 2), _block(32, 48, 2), _block(48, 64, 2))
        self.project = nn.Linear(64, features)

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        """Take pixels in -1..1, `[batch, 1, 32, 32]`."""
        return nn.functional.normalize(self.project(self.blocks(pixels).mean(dim=(2, 3))), dim=1)


def _double(features: torch.Tensor) -> torch.Tensor:
    return nn.functional.interpolate(features, scale_factor=2.0, mode="nearest")
