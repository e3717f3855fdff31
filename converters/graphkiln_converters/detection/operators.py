"""Detection operators for batches in PyTorch, with translations to ONNX: suppression, region pooling, keypoints.

torchvision's suppression takes one image and returns a varying number of boxes, which cannot be batched. This one
keeps the shapes: suppressed boxes get the score 0.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import onnxscript
import torch
from onnxscript import FLOAT, opset18
from onnxscript import opset18 as op

from graphkiln_converters.torch_libraries import import_torchvision

Floats = npt.NDArray[np.float32]
_UNLIMITED = sys.maxsize


@torch.library.custom_op("graphkiln::suppress", mutates_args=())
def suppress(boxes: torch.Tensor, scores: torch.Tensor, iou_threshold: float) -> torch.Tensor:
    """Apply non-maximum suppression within each class and set suppressed scores to 0.

    Args:
        boxes: FP32 `[groups, boxes, 4]` as x1, y1, x2, y2.
        scores: FP32 `[groups, classes, boxes]`; only positive scores are candidates.
        iou_threshold: Largest intersection over union of two kept boxes.

    Returns:
        FP32 `[groups, classes, boxes]`: the score of a kept box, else 0. Of equal scores the first box wins.
    """
    kept = np.zeros(tuple(scores.shape), np.float32)
    boxes_f32, scores_f32 = boxes.float().numpy(), scores.float().numpy()
    for group, of_group in enumerate(scores_f32):
        for number, of_class in enumerate(of_group):
            chosen = keep(boxes_f32[group], of_class, iou_threshold)
            kept[group, number, chosen] = of_class[chosen]
    return torch.from_numpy(kept).to(scores.dtype)


@suppress.register_fake
def _(boxes: torch.Tensor, scores: torch.Tensor, iou_threshold: float) -> torch.Tensor:  # noqa: ARG001
    return torch.empty_like(scores)


def keep(boxes: Floats, scores: Floats, iou_threshold: float) -> npt.NDArray[np.int64]:
    """Return the indices of kept boxes, best first.

    Args:
        boxes: `[boxes, 4]` as x1, y1, x2, y2.
        scores: `[boxes]`; only positive scores are candidates.
        iou_threshold: Largest intersection over union of two kept boxes.

    Source: `torchvision.ops.nms`, in the same precision and order of operations.
    """
    order = np.argsort(-scores, kind="stable")
    order = order[scores[order] > 0]
    ranked = boxes[order]
    alive = np.ones(len(order), np.bool_)
    for index in range(len(order)):
        if alive[index]:
            rest = slice(index + 1, None)
            alive[rest] &= ~(_overlaps(ranked[index], ranked[rest]) > iou_threshold)
    return order[alive]


def _overlaps(box: Floats, others: Floats) -> Floats:
    least, most = np.maximum(box[:2], others[:, :2]), np.minimum(box[2:], others[:, 2:])
    sides = np.maximum(most - least, np.float32(0))
    shared = sides[:, 0] * sides[:, 1]
    with np.errstate(invalid="ignore", divide="ignore"):  # boxes without an area do not overlap
        return np.asarray(shared / (_areas(box) + _areas(others) - shared), np.float32)


def _areas(boxes: Floats) -> Floats:
    sides: Floats = boxes[..., 2:] - boxes[..., :2]
    areas: Floats = sides[..., 0] * sides[..., 1]
    return areas


@onnxscript.script(default_opset=op)
def suppress_in_graph(boxes: FLOAT, scores: FLOAT, iou_threshold: float) -> FLOAT:
    """`suppress` as ONNX operators, for any number of groups, classes and boxes."""
    limit = op.Constant(value_int=_UNLIMITED)
    iou = op.Constant(value_float=iou_threshold)
    zero = op.Constant(value_float=0.0)
    chosen = op.NonMaxSuppression(boxes, scores, limit, iou, zero)  # type: ignore[arg-type]
    return op.ScatterND(op.Mul(scores, zero), chosen, op.GatherND(scores, chosen))  # type: ignore[type-var,return-value]


# Region pooling of two-stage detectors, for batches.

# Boxes whose features are copied at a time.
_AT_ONCE = 16


@torch.library.custom_op("graphkiln::pool", mutates_args=())
def pool(features: torch.Tensor, boxes: torch.Tensor, scale: float, side: int, samples: int) -> torch.Tensor:
    """Average features in a grid over each box.

    Args:
        features: FP32 `[batch, channels, height, width]`.
        boxes: FP32 `[boxes, 5]`: index of the image, then x1, y1, x2, y2 in pixels of the input.
        scale: Size of the feature map divided by the size of the input.
        side: Grid cells per direction.
        samples: Sampling points per grid cell and direction.

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
    """Call `torchvision.ops.roi_align`, or compute it in PyTorch if torchvision was built for another PyTorch.

    torchvision's own fallback uses the border value for points outside the features; the compiled kernel uses 0.
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
    """Weights of linear interpolation at points `[boxes, points]` of a row: `[boxes, points, size]`; 0 outside."""
    inside = (points >= -1) & (points <= size)
    distance = (points.clamp(0, size - 1).unsqueeze(2) - torch.arange(size)).abs()
    return (1 - distance).clamp(min=0) * inside.unsqueeze(2)


@onnxscript.script(default_opset=op)
def pool_in_graph(features: FLOAT, boxes: FLOAT, scale: float, side: int, samples: int) -> FLOAT:
    """`pool` as ONNX operators."""
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


# Peaks of heatmaps: each heatmap is resized to the pixels of its box, so sizes differ and the graph loops over the
# boxes of all images.

_op: Any = opset18  # untyped: onnxscript's types are narrower than what this function passes


@torch.library.custom_op("graphkiln::locate", mutates_args=())
def locate(heatmaps: torch.Tensor, boxes: torch.Tensor) -> torch.Tensor:
    """Find the peak of each heatmap, resized to its box.

    Args:
        heatmaps: FP32 `[boxes, keypoints, height, width]`.
        boxes: FP32 `[boxes, 4]` as x1, y1, x2, y2 in pixels of the input.

    Returns:
        FP32 `[boxes, keypoints, 3]`: x, y in pixels of the input, and the value of the heatmap there.

    Source: `torchvision.models.detection.roi_heads.heatmaps_to_keypoints`.
    """
    heads = importlib.import_module("torchvision.models.detection.roi_heads")
    return merge_scores(*heads.heatmaps_to_keypoints(heatmaps, boxes))


@locate.register_fake
def _(heatmaps: torch.Tensor, boxes: torch.Tensor) -> torch.Tensor:
    return heatmaps.new_empty((boxes.shape[0], heatmaps.shape[1], 3))


def merge_scores(points: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    """Replace torchvision's constant visibility of keypoints by their scores.

    Args:
        points: `[boxes, keypoints, 3]`.
        scores: `[boxes, keypoints]`.
    """
    return torch.cat((points[..., :2], scores.unsqueeze(-1)), -1)


@onnxscript.script(default_opset=_op)
def locate_in_graph(heatmaps: FLOAT, boxes: FLOAT) -> FLOAT:
    """`locate` as ONNX operators."""
    zero = _op.Constant(value_ints=[0])
    one = _op.Constant(value_ints=[1])
    two = _op.Constant(value_ints=[2])
    corners = _op.Slice(boxes, zero, two, one)
    opposite = _op.Slice(boxes, two, _op.Constant(value_ints=[4]), one)
    sides = _op.Max(_op.Sub(opposite, corners), _op.Constant(value_float=1.0))
    whole = _op.Ceil(sides)
    pixels = _op.Cast(whole, to=7)
    points = _op.Shape(heatmaps, start=1, end=2)
    count = _op.Squeeze(_op.Shape(boxes, start=0, end=1))
    found = _op.ConstantOfShape(_op.Concat(zero, points, _op.Constant(value_ints=[3]), axis=0))
    for index in range(count):
        size = _op.Gather(pixels, index)
        width = _op.Slice(size, zero, one)
        height = _op.Slice(size, one, two)
        heatmap = _op.Unsqueeze(_op.Gather(heatmaps, index), zero)
        enlarged = _op.Resize(
            heatmap,
            None,
            None,
            _op.Concat(one, points, height, width, axis=0),
            mode="cubic",
            coordinate_transformation_mode="half_pixel",
            cubic_coeff_a=-0.75,
        )
        flat = _op.Reshape(enlarged, _op.Concat(points, _op.Constant(value_ints=[-1]), axis=0))
        highest = _op.ArgMax(flat, axis=1, keepdims=1)
        place = _op.Cast(
            _op.Concat(_op.Mod(highest, width), _op.Div(highest, width), axis=1),
            to=1,
        )
        step = _op.Div(_op.Gather(sides, index), _op.Gather(whole, index))
        middle = _op.Add(place, _op.Constant(value_float=0.5))
        moved = _op.Add(_op.Mul(middle, step), _op.Gather(corners, index))
        row = _op.Concat(moved, _op.GatherElements(flat, highest, axis=1), axis=1)
        found = _op.Concat(found, _op.Unsqueeze(row, zero), axis=0)
    return found  # type: ignore[no-any-return]


def translations() -> dict[Any, Callable[..., Any]]:
    """Translations of these operators for the ONNX exporter."""
    return {
        torch.ops.graphkiln.suppress.default: suppress_in_graph,
        torch.ops.graphkiln.pool.default: pool_in_graph,
        torch.ops.graphkiln.locate.default: locate_in_graph,
    }
