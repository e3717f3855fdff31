"""Suppression, region pooling and peaks of heatmaps, compared with torchvision and in ONNX Runtime."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx_ir
import pytest
import torch
from detections import found_by_search, made_boxes, run_graph

from graphkiln_converters.detection.operators import (
    keep,
    locate,
    locate_in_graph,
    pool,
    pool_in_graph,
    suppress,
)
from graphkiln_converters.torch_libraries import import_torchvision


@pytest.mark.parametrize("threshold", [0.45, 1.0])
def test_kept_boxes_are_those_of_a_greedy_search(threshold: float) -> None:
    boxes, scores = made_boxes(seed=1, count=200)
    expected = found_by_search(boxes, scores, threshold)
    assert keep(boxes, scores, threshold).tolist() == expected
    assert threshold == 1.0 or len(expected) < 200, "nothing was suppressed"


def test_kept_boxes_are_those_of_torchvision() -> None:
    torchvision = import_torchvision()
    if not torchvision.extension._has_ops():
        pytest.skip("torchvision's compiled operators are built for another PyTorch")
    boxes, scores = made_boxes(seed=0, count=300)
    expected = torchvision.ops.nms(torch.from_numpy(boxes), torch.from_numpy(scores), 0.5)
    assert keep(boxes, scores, 0.5).tolist() == expected.tolist()


def test_of_equal_scores_the_first_box_wins() -> None:
    boxes = np.array([[0, 0, 10, 10], [0, 0, 10, 9], [50, 50, 60, 60]], np.float32)
    assert keep(boxes, np.full(3, 0.5, np.float32), 0.5).tolist() == [0, 2]


def test_boxes_without_an_area_suppress_nothing() -> None:
    boxes = np.zeros((3, 4), np.float32)
    assert keep(boxes, np.array([0.3, 0.2, 0.1], np.float32), 0.5).tolist() == [0, 1, 2]


def test_boxes_without_positive_scores_are_ignored() -> None:
    boxes, _ = made_boxes(seed=1, count=3)
    assert keep(boxes, np.array([0, -1, 0.1], np.float32), 0.5).tolist() == [2]


def test_suppression_keeps_the_shape_of_a_batch() -> None:
    boxes, scores = made_boxes(seed=2, count=60)
    groups = torch.from_numpy(np.stack([boxes, boxes[::-1].copy()]))
    by_class = torch.from_numpy(np.stack([np.stack([scores, scores[::-1]])] * 2))
    kept = suppress(groups, by_class, 0.5)
    assert kept.shape == by_class.shape
    assert torch.nonzero(kept[0, 0]).flatten().tolist() == sorted(found_by_search(boxes, scores, 0.5))
    assert torch.equal(kept[kept > 0], by_class[kept > 0])


# Pooled regions.

BOXES = torch.tensor([[1.0, 2, 9, 14], [0, 0, 15, 15], [3.5, 4.25, 4, 5], [0, 0, 0, 0]])


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(5))


def test_constant_features_are_pooled_to_the_constant() -> None:
    regions = torch.cat((torch.tensor([[0.0], [1], [1], [0]]), BOXES), 1)
    features = torch.stack((torch.full((2, 8, 8), 3.0), torch.full((2, 8, 8), 5.0)))
    pooled = pool(features, regions, 0.5, 2, 2)
    assert pooled.shape == (4, 2, 2, 2)
    assert pooled[:, 0, 0, 0].tolist() == [3, 5, 5, 3]


def test_a_ramp_is_pooled_at_the_centers_of_cells() -> None:
    ramp = torch.arange(16.0).expand(1, 1, 16, 16)
    pooled = pool(ramp, torch.tensor([[0.0, 2, 2, 10, 10]]), 1.0, 2, 2)
    assert pooled[0, 0].tolist() == [[4, 8], [4, 8]]


def test_the_graph_pools_as_pytorch_does(tmp_path: Path) -> None:
    features, regions = drawn(2, 3, 16, 16), torch.cat((torch.tensor([[0.0], [1], [1], [0]]), BOXES), 1)
    found = run(pool_in_graph, tmp_path, {"scale": 0.5, "side": 3, "samples": 2}, features=features, boxes=regions)
    np.testing.assert_allclose(found, pool(features, regions, 0.5, 3, 2), atol=1e-5)


def test_points_outside_of_the_features_are_zero() -> None:
    thin = torch.tensor([[0.0, 63, 0, 64, 64]])  # in cells of 8: from 7.875, one wide at least
    pooled = pool(torch.ones(1, 1, 8, 8), thin, 1 / 8, 2, 2)
    assert pooled[0, 0, 0].tolist() == [0.5, 0]


def run(function: Callable[..., object], folder: Path, attributes: dict[str, float], **feeds: torch.Tensor) -> object:
    """Run a function of onnxscript in ONNX Runtime."""
    made = onnx_ir.from_proto(function.to_function_proto())  # type: ignore[attr-defined]
    names = list(feeds)
    inputs = [onnx_ir.val(name, onnx_ir.DataType.FLOAT, list(feeds[name].shape)) for name in names]
    node = onnx_ir.node(made.name, inputs, attributes=attributes, domain=made.domain, num_outputs=1)
    node.outputs[0].name, node.outputs[0].dtype = "found", onnx_ir.DataType.FLOAT
    graph = onnx_ir.Graph(inputs, node.outputs, nodes=[node], opset_imports={"": 18, made.domain: 1}, name="g")
    model = onnx_ir.Model(graph, ir_version=9, functions=[made])
    return run_graph(model, folder, **{name: tensor.numpy() for name, tensor in feeds.items()})["found"]


# Peaks of heatmaps.

import_torchvision()
BOXES_OF_KEYPOINTS = torch.tensor(
    [[1.25, 2, 9, 14.5], [0, 0, 64, 48], [3.5, 4.25, 4, 5], [0, 0, 0, 0], [10, 20, 16, 70.75]]
)


def test_a_peak_is_located_in_its_box() -> None:
    heatmaps = torch.zeros(1, 2, 8, 8)
    heatmaps[0, 0, 2, 5], heatmaps[0, 1, 7, 0] = 3.0, 4.0
    found = locate(heatmaps, torch.tensor([[100.0, 50, 108, 58]]))
    assert found[0].tolist() == [[105.5, 52.5, 3], [100.5, 57.5, 4]]


@pytest.mark.parametrize("boxes", [BOXES_OF_KEYPOINTS, BOXES_OF_KEYPOINTS[:0]])
def test_the_graph_locates_the_same_peaks_as_torchvision(boxes: torch.Tensor, tmp_path: Path) -> None:
    heatmaps = drawn(len(boxes), 3, 14, 14)
    heads = importlib.import_module("torchvision.models.detection.roi_heads")
    points, scores = heads.heatmaps_to_keypoints(heatmaps, boxes)
    found = np.asarray(run(locate_in_graph, tmp_path, {}, heatmaps=heatmaps, boxes=boxes))
    assert found.shape == (len(boxes), 3, 3)
    np.testing.assert_allclose(found[..., :2], points[..., :2], rtol=0, atol=1e-3)
    np.testing.assert_allclose(found[..., 2], scores, rtol=0, atol=1e-4)
