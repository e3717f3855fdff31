"""The operator of two-stage detectors, for batches: features of regions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import onnxscript
import torch
from onnxscript import FLOAT
from onnxscript import opset18 as op

from graphkiln_converters.torch_libraries import import_torchvision

_AT_ONCE = 16
"""Boxes whose features are copied at a time."""


@torch.library.custom_op("graphkiln::pool", mutates_args=())
def pool(features: torch.Tensor, boxes: torch.Tensor, scale: float, side: int, samples: int) -> torch.Tensor:
    """Averages features in a grid over each box.

    Args:
        features: FP32 `[batch, channels, height, width]`.
        boxes: FP32 `[boxes, 5]`: which image of the batch, then x1, y1, x2, y2 in pixels of the input.
        scale: Cells of the features in a pixel of the input.
        side: Cells of the grid, in each direction.
        samples: Points in each cell of the grid, in each direction.

    Returns:
        FP32 `[boxes, channels, side, side]`.
    """
    return pool_by_library(features, boxes, side, scale, samples)


@pool.register_fake
def _(features: torch.Tensor, boxes: torch.Tensor, scale: float, side: int, samples: int) -> torch.Tensor:  # noqa: ARG001
    return features.new_empty((boxes.shape[0], features.shape[1], side, side))


def pool_by_library(
    features: torch.Tensor, rois: torch.Tensor, output_size: Any, spatial_scale: float = 1.0, sampling_ratio: int = -1
) -> torch.Tensor:
    """`torchvision.ops.roi_align`; its kernel in PyTorch where its operators are built for another PyTorch.

    torchvision's own replacement gives points outside of the features the value at the border, where the kernel has 0.
    """
    torchvision = import_torchvision()
    if torchvision.extension._has_ops():  # noqa: SLF001 - torchvision's own question
        return torch.as_tensor(torchvision.ops.roi_align(features, rois, output_size, spatial_scale, sampling_ratio))
    side = output_size if isinstance(output_size, int) else output_size[0]
    parts = [_pooled(features, part, spatial_scale, side, sampling_ratio) for part in torch.split(rois, _AT_ONCE)]
    return torch.cat(parts) if parts else features.new_zeros((0, features.shape[1], side, side))


def _pooled(features: torch.Tensor, boxes: torch.Tensor, scale: float, side: int, samples: int) -> torch.Tensor:
    """Source: `roi_align_forward_kernel_impl` of torchvision, as sums over rows and columns."""
    corners, opposite = boxes[:, 1:3] * scale, boxes[:, 3:5] * scale
    sides = (opposite - corners).clamp(min=1).unsqueeze(2)
    points = corners.unsqueeze(2) + (torch.arange(side * samples) + 0.5) / (side * samples) * sides
    across, down = _weights(points[:, 0], features.shape[3]), _weights(points[:, 1], features.shape[2])
    found = down.unsqueeze(1) @ features[boxes[:, 0].long()] @ across.transpose(1, 2).unsqueeze(1)
    return found.reshape(*found.shape[:2], side, samples, side, samples).mean((3, 5))


def _weights(points: torch.Tensor, size: int) -> torch.Tensor:
    """Of linear interpolation at points `[boxes, points]` of a row: `[boxes, points, size]`; 0 outside."""
    inside = (points >= -1) & (points <= size)
    distance = (points.clamp(0, size - 1).unsqueeze(2) - torch.arange(size)).abs()
    return (1 - distance).clamp(min=0) * inside.unsqueeze(2)


@onnxscript.script(default_opset=op)
def pool_in_graph(features: FLOAT, boxes: FLOAT, scale: float, side: int, samples: int) -> FLOAT:
    """What `pool` is in a graph."""
    one = op.Constant(value_ints=[1])
    images = op.Squeeze(op.Slice(boxes, op.Constant(value_ints=[0]), one, one), one)  # type: ignore[type-var,arg-type]
    return op.RoiAlign(
        features,
        op.Slice(boxes, one, op.Constant(value_ints=[5]), one),  # type: ignore[type-var]
        op.Cast(images, to=7),  # type: ignore[arg-type]
        coordinate_transformation_mode="output_half_pixel",
        mode="avg",
        output_height=side,
        output_width=side,
        sampling_ratio=samples,
        spatial_scale=scale,
    )


def translations() -> dict[Any, Callable[..., Any]]:
    """Operators of this room -> what the exporter writes for them."""
    return {torch.ops.graphkiln.pool.default: pool_in_graph}
