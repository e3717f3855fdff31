"""Non-maximum suppression of batches, as an operator of PyTorch that is exported as ONNX's NonMaxSuppression.

torchvision's operator takes one image and returns as many boxes as it keeps: nothing that a batch can be made of. This
one keeps the shapes: what is suppressed gets the score 0.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import onnxscript
import torch
from onnxscript import FLOAT
from onnxscript import opset18 as op

Floats = npt.NDArray[np.float32]
_UNLIMITED = sys.maxsize


@torch.library.custom_op("graphkiln::suppress", mutates_args=())
def suppress(boxes: torch.Tensor, scores: torch.Tensor, iou_threshold: float) -> torch.Tensor:
    """Keeps the scores of the boxes that no better box of the same class overlaps.

    Args:
        boxes: FP32 `[groups, boxes, 4]` as x1, y1, x2, y2.
        scores: FP32 `[groups, classes, boxes]`; those that are not positive are no candidates.
        iou_threshold: Most that two boxes which are kept may overlap, as intersection over union.

    Returns:
        FP32 `[groups, classes, boxes]`: the score where a box is kept, else 0. Of equal scores the first box counts as
        the better one.
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
    """Indices of the boxes that are kept, best first.

    Args:
        boxes: `[boxes, 4]` as x1, y1, x2, y2.
        scores: `[boxes]`; those that are not positive are no candidates.
        iou_threshold: Most that two boxes which are kept may overlap.

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
    with np.errstate(invalid="ignore", divide="ignore"):  # two boxes without an area overlap nothing
        return np.asarray(shared / (_areas(box) + _areas(others) - shared), np.float32)


def _areas(boxes: Floats) -> Floats:
    sides: Floats = boxes[..., 2:] - boxes[..., :2]
    areas: Floats = sides[..., 0] * sides[..., 1]
    return areas


@onnxscript.script(default_opset=op)
def suppress_in_graph(boxes: FLOAT, scores: FLOAT, iou_threshold: float) -> FLOAT:
    """What `suppress` is in a graph, for any number of groups, classes and boxes."""
    limit = op.Constant(value_int=_UNLIMITED)
    iou = op.Constant(value_float=iou_threshold)
    zero = op.Constant(value_float=0.0)
    chosen = op.NonMaxSuppression(boxes, scores, limit, iou, zero)  # type: ignore[arg-type]
    return op.ScatterND(op.Mul(scores, zero), chosen, op.GatherND(scores, chosen))  # type: ignore[type-var,return-value]


def translations() -> dict[Any, Callable[..., Any]]:
    """Operators of this room -> what the exporter writes for them."""
    return {torch.ops.graphkiln.suppress.default: suppress_in_graph}
