"""Masks in pixels of the image, and COCO run lengths.

A mask keeps the model's resolution and is resized on access: three hundred masks of a large image would fill the
memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from graphkiln_backend.graph.dtypes import AnyArray
from graphkiln_backend.images.frame import Frame

Floats = npt.NDArray[np.float32]
Places = npt.NDArray[np.float64]
Pixels = npt.NDArray[np.bool_]
ClassMap = npt.NDArray[np.uint8] | npt.NDArray[np.int32]
_T = TypeVar("_T", bound=np.generic)

_MOST_VALUES = 1 << 24  # for one strip of rows: all classes of a large image would fill the memory
_FARTHEST = 1 << 24  # limit of exact pixel coordinates in float32; boxes beyond are ignored


def sample_bilinear(grid: Floats, rows: Places, columns: Places) -> Floats:
    """Sample a grid bilinearly at all combinations of rows and columns; values beyond its edges are those of the edge.

    Args:
        grid: FP32 `[n, grid_rows, grid_columns]`.
        rows: Positions in cells: the first cell spans 0 to 1.
        columns: Positions in cells.

    Returns:
        `[n, len(rows), len(columns)]`.

    Source: `torch.nn.functional.interpolate`, mode bilinear, align_corners False.
    """
    upper, lower, down = _neighbors(rows, grid.shape[1])
    before, after, along = _neighbors(columns, grid.shape[2])
    down = down[:, np.newaxis]
    mixed = grid[:, upper] * (1 - down) + grid[:, lower] * down
    sampled: Floats = mixed[:, :, before] * (1 - along) + mixed[:, :, after] * along
    return sampled


def best_class(scores: Floats, rows: Places, columns: Places) -> ClassMap:
    """Class with the highest score at all combinations of rows and columns.

    Args:
        scores: FP32 `[classes, grid_rows, grid_columns]`.
        rows: As for `sample_bilinear`.
        columns: As for `sample_bilinear`.

    Returns:
        `[len(rows), len(columns)]`; UINT8 if possible, because there may be a hundred million pixels.
    """
    kind = np.uint8 if len(scores) <= 256 else np.int32
    step = max(1, _MOST_VALUES // max(1, len(scores) * len(columns)))
    strips = [rows[start : start + step] for start in range(0, len(rows), step)]
    classes = [sample_bilinear(scores, strip, columns).argmax(axis=0).astype(kind) for strip in strips]
    found: ClassMap = np.concatenate(classes)
    return found


def sample_nearest(grid: npt.NDArray[_T], rows: Places, columns: Places) -> npt.NDArray[_T]:
    """Sample a grid `[grid_rows, grid_columns]` by nearest neighbor at all combinations of rows and columns."""
    row = np.clip(np.floor(rows).astype(np.int64), 0, grid.shape[0] - 1)
    column = np.clip(np.floor(columns).astype(np.int64), 0, grid.shape[1] - 1)
    cells: npt.NDArray[_T] = grid[row[:, np.newaxis], column]
    return cells


def _neighbors(places: Places, size: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], Floats]:
    """Neighboring cells of each position, and its relative distance from the center of the first."""
    centered = np.clip(places - 0.5, 0, size - 1)
    first = np.floor(centered).astype(np.int64)
    return first, np.minimum(first + 1, size - 1), (centered - first).astype(np.float32)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Mask:
    """Mask of one detected object.

    Attributes:
        probabilities: `[mask_height, mask_width]`, from 0 to 1.
        frame: Frame of the image.
        box: Area of the probabilities, x1, y1, x2, y2 in pixels of the image; None for the model's whole input.
    """

    probabilities: AnyArray
    frame: Frame
    box: tuple[float, float, float, float] | None = None

    def pixels(self, threshold: float = 0.5) -> Pixels:
        """The mask at the size of the image, `[height, width]`: true where the probability exceeds the threshold."""
        if self.box is not None:
            return _paste(self.probabilities, self.box, self.frame, threshold)
        grid_height, grid_width = self.probabilities.shape
        rows = self.frame.rows() * (grid_height / self.frame.input_height)
        columns = self.frame.columns() * (grid_width / self.frame.input_width)
        sampled = sample_bilinear(self.probabilities.astype(np.float32)[np.newaxis], rows, columns)[0]
        return np.asarray(sampled > threshold)

    def rle(self, threshold: float = 0.5) -> dict[str, Any]:
        """The mask as COCO's uncompressed run lengths: `size` is `[height, width]`, `counts` a list."""
        return encode_rle(self.pixels(threshold))


def encode_rle(pixels: Pixels) -> dict[str, Any]:
    """Run lengths of a mask in column-major order, beginning with zeros.

    Args:
        pixels: `[height, width]`.

    Source: COCO's `maskApi.c` (`rleEncode`), uncompressed counts.
    """
    flat = np.asarray(pixels, bool).ravel(order="F")
    edges = np.flatnonzero(flat[1:] != flat[:-1]) + 1
    counts = np.diff(np.concatenate(([0], edges, [flat.size]))).tolist() if flat.size else []
    return {"size": list(pixels.shape), "counts": [0, *counts] if flat.size and flat[0] else counts}


def _paste(probabilities: AnyArray, box: Sequence[float], frame: Frame, threshold: float) -> Pixels:
    """Resize the mask of a box to the box.

    Source: `torchvision.models.detection.roi_heads.paste_masks_in_image`: a border of one cell, whole pixels.
    """
    if not (np.abs(box) < _FARTHEST).all():  # also if a corner is NaN after an overflow
        return np.zeros((frame.height, frame.width), bool)
    padded = np.pad(probabilities.astype(np.float32), 1)
    left, top, right, bottom = _expanded(box, probabilities.shape)
    width, height = max(right - left + 1, 1), max(bottom - top + 1, 1)
    x1, y1 = max(left, 0), max(top, 0)
    x2, y2 = min(right + 1, frame.width), min(bottom + 1, frame.height)
    pixels = np.zeros((frame.height, frame.width), bool)
    if x1 < x2 and y1 < y2:
        rows = (np.arange(y1, y2) - top + 0.5) * (padded.shape[0] / height)
        columns = (np.arange(x1, x2) - left + 0.5) * (padded.shape[1] / width)
        pixels[y1:y2, x1:x2] = sample_bilinear(padded[np.newaxis], rows, columns)[0] > threshold
    return pixels


def _expanded(box: Sequence[float], shape: Sequence[int]) -> tuple[int, int, int, int]:
    """A box with the border of its padded mask, in whole pixels."""
    ends = []
    for low, high, size in ((box[0], box[2], shape[1]), (box[1], box[3], shape[0])):
        first, last = np.float32(low), np.float32(high)
        half = (last - first) * np.float32(0.5) * np.float32((size + 2) / size)
        center = (last + first) * np.float32(0.5)
        ends.append((int(center - half), int(center + half)))
    return ends[0][0], ends[1][0], ends[0][1], ends[1][1]
