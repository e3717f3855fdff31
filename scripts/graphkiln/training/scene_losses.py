"""What the networks for scenes of digits are trained to make small."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from graphkiln.training.scene_networks import STRIDE
from graphkiln.training.scenes import SIDE, Scene

_CELLS = SIDE // STRIDE
_SPREAD = 0.08
"""Width of a peak as a share of its box's sides."""
_NEAR = 0.5
"""Cells where the heat is higher than this learn the box, too."""
_TINY = 1e-6


class DetectorTargets:
    """What a detector should say of a set of scenes.

    Attributes:
        heat: 1 at the centre of each digit, falling off around it, `[scenes, classes, rows, columns]`.
        boxes: Of the digit that a cell belongs to, in pixels, `[scenes, 4, rows, columns]`.
        weights: How much a cell has to say about its box, `[scenes, rows, columns]`.
    """

    def __init__(self, scenes: Sequence[Scene], classes: int) -> None:
        self.heat = torch.zeros(len(scenes), classes, _CELLS, _CELLS)
        self.boxes = torch.zeros(len(scenes), 4, _CELLS, _CELLS)
        self.weights = torch.zeros(len(scenes), _CELLS, _CELLS)
        centres = (torch.arange(_CELLS, dtype=torch.float32) + 0.5) * STRIDE
        for number, scene in enumerate(scenes):
            for box, value in zip(torch.from_numpy(scene.boxes), scene.classes.tolist(), strict=True):
                self._add(number, box, value, centres)

    def _add(self, number: int, box: torch.Tensor, value: int, centres: torch.Tensor) -> None:
        x1, y1, x2, y2 = box.tolist()
        rows, columns = (
            torch.exp(-(((centres - _nearest(centres, (low + high) / 2)) / ((high - low) * _SPREAD + 2)) ** 2) / 2)
            for low, high in ((y1, y2), (x1, x2))
        )
        peak = rows.unsqueeze(1) * columns.unsqueeze(0)
        self.heat[number, value] = torch.maximum(self.heat[number, value], peak)
        near = (peak > _NEAR) & (peak > self.weights[number])
        self.weights[number][near] = peak[near]
        self.boxes[number][:, near] = box.unsqueeze(1)


def _nearest(centres: torch.Tensor, position: float) -> torch.Tensor:
    return centres[(centres - position).abs().argmin()]


def detector_loss(
    logits: torch.Tensor, boxes: torch.Tensor, targets: DetectorTargets, rows: torch.Tensor
) -> torch.Tensor:
    """Focal loss of the peaks and one minus the intersection over union of the boxes near them.

    Source: Law and Deng, "CornerNet", 2018 (the focal loss); Rezatofighi et al., "Generalized IoU", 2019.
    """
    heat, wanted, weights = targets.heat[rows], targets.boxes[rows], targets.weights[rows]
    chance = logits.sigmoid().clamp(_TINY, 1 - _TINY)
    positive = heat == 1
    hit = ((1 - chance) ** 2 * chance.log())[positive].sum()
    miss = ((1 - heat) ** 4 * chance**2 * (1 - chance).log())[~positive].sum()
    focal = -(hit + miss) / positive.sum().clamp(min=1)
    return focal + 2 * (weights * (1 - generalized_iou(boxes, wanted))).sum() / weights.sum().clamp(min=1)


def generalized_iou(boxes: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
    """Of boxes that stand at the same place, `[batch, 4, ...]` each, -1..1 `[batch, ...]`."""
    x1, y1, x2, y2 = boxes.unbind(dim=1)
    u1, v1, u2, v2 = others.unbind(dim=1)
    across = (torch.minimum(x2, u2) - torch.maximum(x1, u1)).clamp(min=0)
    down = (torch.minimum(y2, v2) - torch.maximum(y1, v1)).clamp(min=0)
    shared = across * down
    union = (x2 - x1) * (y2 - y1) + (u2 - u1) * (v2 - v1) - shared
    hull = (torch.maximum(x2, u2) - torch.minimum(x1, u1)) * (torch.maximum(y2, v2) - torch.minimum(y1, v1))
    return shared / union.clamp(min=_TINY) - (hull - union) / hull.clamp(min=_TINY)


def stroke_loss(ink: torch.Tensor, classes: torch.Tensor) -> torch.Tensor:
    """Cross entropy of ink and background, and one minus their overlap, which thin strokes need.

    Args:
        ink: Logits, `[batch, 1, height, width]`.
        classes: Of each pixel, int64 `[batch, height, width]`; 0 is the background.

    Source: Milletari, Navab, Ahmadi, "V-Net", 2016 (the Dice loss).
    """
    wanted = (classes > 0).float().unsqueeze(1)
    share = ink.sigmoid()
    overlap = 2 * (share * wanted).sum() / (share + wanted).sum().clamp(min=1)
    return nn.functional.binary_cross_entropy_with_logits(ink, wanted) + 1 - overlap


def embedding_loss(vectors: torch.Tensor, directions: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Cross entropy of the cosines with a direction for each class, `[classes, features]`.

    Source: Wang et al., "CosFace", 2018 (the margin of 0.2 and the scale).
    """
    cosines = vectors @ nn.functional.normalize(directions, dim=1).T
    margin = 0.2 * nn.functional.one_hot(values, len(directions))
    return nn.functional.cross_entropy(16 * (cosines - margin), values)
