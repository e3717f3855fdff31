"""Values of a grid between its cells: bilinear as torch's `interpolate(align_corners=False)`, or nearest."""

from __future__ import annotations

from typing import TypeVar

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]
Places = npt.NDArray[np.float64]
ClassMap = npt.NDArray[np.uint8] | npt.NDArray[np.int32]
_T = TypeVar("_T", bound=np.generic)

_MOST_VALUES = 1 << 24
"""Of one strip of rows: all classes of a large image would fill the memory."""


def sample_bilinear(grid: Floats, rows: Places, columns: Places) -> Floats:
    """Samples a grid at every crossing of rows and columns; beyond its edge the outermost cells go on.

    Args:
        grid: FP32 `[n, grid_rows, grid_columns]`.
        rows: Where to sample, in cells: the first reaches from 0 to 1.
        columns: Likewise.

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
    """The class with the highest score, at every crossing of rows and columns.

    Args:
        scores: FP32 `[classes, grid_rows, grid_columns]`.
        rows: As for `sample_bilinear`.
        columns: Likewise.

    Returns:
        `[len(rows), len(columns)]`; UINT8 where that holds them, for there may be a hundred million.
    """
    kind = np.uint8 if len(scores) <= 256 else np.int32
    step = max(1, _MOST_VALUES // max(1, len(scores) * len(columns)))
    strips = [rows[start : start + step] for start in range(0, len(rows), step)]
    classes = [sample_bilinear(scores, strip, columns).argmax(axis=0).astype(kind) for strip in strips]
    found: ClassMap = np.concatenate(classes)
    return found


def sample_nearest(grid: npt.NDArray[_T], rows: Places, columns: Places) -> npt.NDArray[_T]:
    """The cells of a grid `[grid_rows, grid_columns]` in which the crossings of rows and columns lie."""
    row = np.clip(np.floor(rows).astype(np.int64), 0, grid.shape[0] - 1)
    column = np.clip(np.floor(columns).astype(np.int64), 0, grid.shape[1] - 1)
    cells: npt.NDArray[_T] = grid[row[:, np.newaxis], column]
    return cells


def _neighbors(places: Places, size: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], Floats]:
    """The cells before and after each place, and how far it is from the center of the first to that of the second."""
    centered = np.clip(places - 0.5, 0, size - 1)
    first = np.floor(centered).astype(np.int64)
    return first, np.minimum(first + 1, size - 1), (centered - first).astype(np.float32)
