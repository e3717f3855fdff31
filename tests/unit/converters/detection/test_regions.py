"""Features of regions, as PyTorch and as graphs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx_ir
import torch
from detections import run_graph

from graphkiln_converters.detection.regions import pool, pool_in_graph, translations

BOXES = torch.tensor([[1.0, 2, 9, 14], [0, 0, 15, 15], [3.5, 4.25, 4, 5], [0, 0, 0, 0]])


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(5))


def test_a_box_on_flat_features_has_their_height() -> None:
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


def test_points_outside_of_the_features_are_nothing() -> None:
    thin = torch.tensor([[0.0, 63, 0, 64, 64]])  # in cells of 8: from 7.875, one wide at least
    pooled = pool(torch.ones(1, 1, 8, 8), thin, 1 / 8, 2, 2)
    assert pooled[0, 0, 0].tolist() == [0.5, 0]


def test_the_operator_has_a_translation() -> None:
    assert [target.name() for target in translations()] == ["graphkiln::pool"]


def run(function: Callable[..., object], folder: Path, attributes: dict[str, float], **feeds: torch.Tensor) -> object:
    """What a function of onnxscript computes in ONNX Runtime."""
    made = onnx_ir.from_proto(function.to_function_proto())  # type: ignore[attr-defined]
    names = list(feeds)
    inputs = [onnx_ir.val(name, onnx_ir.DataType.FLOAT, list(feeds[name].shape)) for name in names]
    node = onnx_ir.node(made.name, inputs, attributes=attributes, domain=made.domain, num_outputs=1)
    node.outputs[0].name, node.outputs[0].dtype = "found", onnx_ir.DataType.FLOAT
    graph = onnx_ir.Graph(inputs, node.outputs, nodes=[node], opset_imports={"": 18, made.domain: 1}, name="g")
    model = onnx_ir.Model(graph, ir_version=9, functions=[made])
    return run_graph(model, folder, **{name: tensor.numpy() for name, tensor in feeds.items()})["found"]
