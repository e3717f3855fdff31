"""Where the points of a thing are: the peaks of its heatmaps, as an operator of PyTorch that is exported as a loop.

Each heatmap is enlarged to the pixels of its own box, so that no two have one size: a graph goes through the boxes one
by one, however many images they are of.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import onnxscript
import torch
from onnxscript import FLOAT, opset18

op: Any = opset18
"""What onnxscript's types say of a tensor's type is more than this function has."""


@torch.library.custom_op("graphkiln::locate", mutates_args=())
def locate(heatmaps: torch.Tensor, boxes: torch.Tensor) -> torch.Tensor:
    """Finds the highest pixel of each heatmap, enlarged to its box.

    Args:
        heatmaps: FP32 `[boxes, keypoints, height, width]`.
        boxes: FP32 `[boxes, 4]` as x1, y1, x2, y2 in pixels of the input.

    Returns:
        FP32 `[boxes, keypoints, 3]`: x, y in pixels of the input, and how high the heatmap is there.

    Source: `torchvision.models.detection.roi_heads.heatmaps_to_keypoints`.
    """
    heads = importlib.import_module("torchvision.models.detection.roi_heads")
    return merge_scores(*heads.heatmaps_to_keypoints(heatmaps, boxes))


@locate.register_fake
def _(heatmaps: torch.Tensor, boxes: torch.Tensor) -> torch.Tensor:
    return heatmaps.new_empty((boxes.shape[0], heatmaps.shape[1], 3))


def merge_scores(points: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    """Keypoints as torchvision returns them, with their scores in the place of a visibility that is always 1.

    Args:
        points: `[boxes, keypoints, 3]`.
        scores: `[boxes, keypoints]`.
    """
    return torch.cat((points[..., :2], scores.unsqueeze(-1)), -1)


@onnxscript.script(default_opset=op)
def locate_in_graph(heatmaps: FLOAT, boxes: FLOAT) -> FLOAT:
    """What `locate` is in a graph."""
    zero = op.Constant(value_ints=[0])
    one = op.Constant(value_ints=[1])
    two = op.Constant(value_ints=[2])
    corners = op.Slice(boxes, zero, two, one)
    opposite = op.Slice(boxes, two, op.Constant(value_ints=[4]), one)
    sides = op.Max(op.Sub(opposite, corners), op.Constant(value_float=1.0))
    whole = op.Ceil(sides)
    pixels = op.Cast(whole, to=7)
    points = op.Shape(heatmaps, start=1, end=2)
    count = op.Squeeze(op.Shape(boxes, start=0, end=1))
    found = op.ConstantOfShape(op.Concat(zero, points, op.Constant(value_ints=[3]), axis=0))
    for index in range(count):
        size = op.Gather(pixels, index)
        width = op.Slice(size, zero, one)
        height = op.Slice(size, one, two)
        heatmap = op.Unsqueeze(op.Gather(heatmaps, index), zero)
        enlarged = op.Resize(
            heatmap,
            None,
            None,
            op.Concat(one, points, height, width, axis=0),
            mode="cubic",
            coordinate_transformation_mode="half_pixel",
            cubic_coeff_a=-0.75,
        )
        flat = op.Reshape(enlarged, op.Concat(points, op.Constant(value_ints=[-1]), axis=0))
        highest = op.ArgMax(flat, axis=1, keepdims=1)
        place = op.Cast(op.Concat(op.Mod(highest, width), op.Div(highest, width), axis=1), to=1)
        step = op.Div(op.Gather(sides, index), op.Gather(whole, index))
        middle = op.Add(place, op.Constant(value_float=0.5))
        moved = op.Add(op.Mul(middle, step), op.Gather(corners, index))
        row = op.Concat(moved, op.GatherElements(flat, highest, axis=1), axis=1)
        found = op.Concat(found, op.Unsqueeze(row, zero), axis=0)
    return found  # type: ignore[no-any-return]


def translations() -> dict[Any, Callable[..., Any]]:
    """Operators of this room -> what the exporter writes for them."""
    return {torch.ops.graphkiln.locate.default: locate_in_graph}
