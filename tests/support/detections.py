"""Boxes with scores, and a reference for non-maximum suppression."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
import onnx_ir

from graphkiln_backend.engines.onnxruntime import OnnxRuntimeEngine
from graphkiln_backend.graph.dtypes import AnyArray

Floats = npt.NDArray[np.float32]


def made_boxes(*, seed: int, count: int, size: float = 100.0) -> tuple[Floats, Floats]:
    """Boxes `[count, 4]` that overlap much, and `[count]` distinct scores."""
    generator = np.random.default_rng(seed)
    corners = generator.random((count, 2)) * size
    boxes = np.concatenate([corners, corners + generator.random((count, 2)) * size], axis=1)
    scores = generator.permutation(np.linspace(0.05, 0.95, count))
    return boxes.astype(np.float32), scores.astype(np.float32)


def run_graph(model: onnx_ir.Model, folder: Path, **feeds: AnyArray) -> dict[str, AnyArray]:
    """Run a graph with ONNX Runtime; return outputs by name."""
    path = folder / "model.onnx"
    onnx_ir.save(model, path)
    with OnnxRuntimeEngine().build_reference(path) as session:
        return session.run(feeds)


def found_by_search(boxes: Floats, scores: Floats, threshold: float) -> list[int]:
    """Indices of boxes that overlap no better one, best first: greedy, pairwise, in fp64."""
    kept: list[int] = []
    for index in sorted(range(len(boxes)), key=lambda each: -float(scores[each])):
        if all(_overlap(boxes[index], boxes[other]) <= threshold for other in kept):
            kept.append(index)
    return kept


def _overlap(one: Floats, other: Floats) -> float:
    left, top, right, bottom = (float(value) for value in one)
    left_other, top_other, right_other, bottom_other = (float(value) for value in other)
    width = max(0.0, min(right, right_other) - max(left, left_other))
    height = max(0.0, min(bottom, bottom_other) - max(top, top_other))
    areas = (right - left) * (bottom - top) + (right_other - left_other) * (bottom_other - top_other)
    return width * height / (areas - width * height)
