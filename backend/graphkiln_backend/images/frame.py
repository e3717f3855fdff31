"""Map pixels of a model's input back to the image: invert resize, crop and letterbox.

A resize maps edges to edges: pixel `i` of `n` covers `i / n` to `(i + 1) / n` of the image. So coordinates refer to
edges: the first pixel spans 0 to 1 and its center is 0.5, and the inverse is exactly a scale and a shift per axis.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from graphkiln_backend.graph.dtypes import AnyArray
from graphkiln_backend.graph.preprocess import Preprocess

Coordinates = npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True, slots=True)
class Frame:
    """Affine map between the pixels of a sample and those of its upright image (EXIF orientation applied).

    Attributes:
        width: Width of the image in pixels.
        height: Height of the image in pixels.
        input_width: Width of the sample in pixels.
        input_height: Height of the sample in pixels.
        scale_x: Pixels of the image per pixel of the sample.
        scale_y: The same for rows.
        left: Column of the sample where the image begins; negative if it is cropped.
        top: The same for rows.
    """

    width: int
    height: int
    input_width: int
    input_height: int
    scale_x: float
    scale_y: float
    left: int
    top: int

    def to_image(self, points: AnyArray) -> Coordinates:
        """Map points of the sample into the image; nothing is clipped.

        Args:
            points: `[..., 2 * n]`: alternating x and y, in pixels of the sample.

        Returns:
            The same shape, in pixels of the image.
        """
        shift, scale = self._repeated(points.shape[-1])
        return (points.astype(np.float64) - shift) * scale

    def to_input(self, points: AnyArray) -> Coordinates:
        """Map points of the image into the sample: the inverse of `to_image`."""
        shift, scale = self._repeated(points.shape[-1])
        return points.astype(np.float64) / scale + shift

    def boxes_to_image(self, boxes: AnyArray) -> Coordinates:
        """Map boxes `[n, 4]` (x1, y1, x2, y2) into the image and clip them to it."""
        limits = np.array([self.width, self.height, self.width, self.height], np.float64)
        return np.clip(self.to_image(boxes), 0, limits)

    def columns(self) -> Coordinates:
        """Centers of the image's columns in coordinates of the sample, `[width]`."""
        return (np.arange(self.width) + 0.5) / self.scale_x + self.left

    def rows(self) -> Coordinates:
        """Centers of the image's rows in coordinates of the sample, `[height]`."""
        return (np.arange(self.height) + 0.5) / self.scale_y + self.top

    def _repeated(self, size: int) -> tuple[Coordinates, Coordinates]:
        shift, scale = np.array([self.left, self.top], np.float64), np.array([self.scale_x, self.scale_y])
        return np.tile(shift, size // 2), np.tile(scale, size // 2)


def frame_of(preprocess: Preprocess, image_size: Sequence[int]) -> Frame:
    """Frame of an image's sample.

    Args:
        preprocess: Preprocessing.
        image_size: `(height, width)` of the upright image, in pixels.
    """
    height, width = image_size
    resized_height, resized_width = preprocess.resized(height, width)
    left, top, right, bottom = preprocess.cropped(resized_height, resized_width)
    return Frame(
        width=width,
        height=height,
        input_width=right - left,
        input_height=bottom - top,
        scale_x=width / resized_width,
        scale_y=height / resized_height,
        left=-left,
        top=-top,
    )
