"""Peaks of heatmaps, as PyTorch and as graphs, beside torchvision's own."""

from __future__ import annotations

import importlib
from pathlib import Path

import numpy as np
import onnx_ir
import pytest
import torch
from detections import run_graph

from graphkiln_converters.detection.keypoints import locate, locate_in_graph, merge_scores, translations
from graphkiln_converters.torch_libraries import import_torchvision

import_torchvision()
BOXES = torch.tensor([[1.25, 2, 9, 14.5], [0, 0, 64, 48], [3.5, 4.25, 4, 5], [0, 0, 0, 0], [10, 20, 16, 70.75]])
"""Also one smaller than a pixel, and one without any size."""


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(5))


def test_a_peak_is_where_it_stands_in_its_box() -> None:
    heatmaps = torch.zeros(1, 2, 8, 8)
    heatmaps[0, 0, 2, 5], heatmaps[0, 1, 7, 0] = 3.0, 4.0
    found = locate(heatmaps, torch.tensor([[100.0, 50, 108, 58]]))
    assert found[0].tolist() == [[105.5, 52.5, 3], [100.5, 57.5, 4]]


def test_scores_take_the_place_of_a_visibility() -> None:
    assert merge_scores(torch.ones(1, 2, 3), torch.tensor([[5.0, 6]])).tolist() == [[[1, 1, 5], [1, 1, 6]]]


@pytest.mark.parametrize("boxes", [BOXES, BOXES[:0]])
def test_the_graph_finds_what_torchvision_finds(boxes: torch.Tensor, tmp_path: Path) -> None:
    heatmaps = drawn(len(boxes), 3, 14, 14)
    heads = importlib.import_module("torchvision.models.detection.roi_heads")
    points, scores = heads.heatmaps_to_keypoints(heatmaps, boxes)
    found = run(tmp_path, heatmaps, boxes)
    assert found.shape == (len(boxes), 3, 3)
    np.testing.assert_allclose(found[..., :2], points[..., :2], rtol=0, atol=1e-3)
    np.testing.assert_allclose(found[..., 2], scores, rtol=0, atol=1e-4)


def test_the_operator_has_a_translation() -> None:
    assert [target.name() for target in translations()] == ["graphkiln::locate"]


def run(folder: Path, heatmaps: torch.Tensor, boxes: torch.Tensor) -> np.ndarray:
    """What the function computes in ONNX Runtime."""
    made = onnx_ir.from_proto(locate_in_graph.to_function_proto())
    inputs = [
        onnx_ir.val("heatmaps", onnx_ir.DataType.FLOAT, ["boxes", *heatmaps.shape[1:]]),
        onnx_ir.val("boxes", onnx_ir.DataType.FLOAT, ["boxes", 4]),
    ]
    node = onnx_ir.node(made.name, inputs, domain=made.domain, num_outputs=1)
    node.outputs[0].name, node.outputs[0].dtype = "found", onnx_ir.DataType.FLOAT
    graph = onnx_ir.Graph(inputs, node.outputs, nodes=[node], opset_imports={"": 18, made.domain: 1}, name="g")
    model = onnx_ir.Model(graph, ir_version=9, functions=[made])
    return run_graph(model, folder, heatmaps=heatmaps.numpy(), boxes=boxes.numpy())["found"]
